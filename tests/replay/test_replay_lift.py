"""The precision lift: formulas without roundings, and bit tricks that are named, not lifted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws.formula import FORMULA
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import corpus, harmless
from twinstep.parity.proof.corpus.entry import Entry, Variant
from twinstep.parity.proof.corpus.judged import row_of
from twinstep.parity.records.errors import CannotJudge
from twinstep.parity.registry.engines import engine_named, running
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.run_plan import PlanRunner
from twinstep.replay.shadow64.lift import Lift, lifting
from twinstep.replay.shadow64.values import SHADOW, sliced


@triton.jit
def piece_kernel(x, y, s, n, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    """Small formulas, one for each way a value can go.

    Triton 3.9 makes `/ 3.0` a product with the reciprocal, a scalar, which is rounded.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    a = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    scale = tl.load(s).to(tl.float32)
    if WHAT == "copy":
        tl.store(y + at, (tl.div_rn(a, 3.0) * scale).to(y.dtype.element_ty), mask=here)
    elif WHAT == "sum":
        tl.atomic_add(y, tl.sum(a * a, axis=0))
    elif WHAT == "trick":
        word = tl.div_rn(a, 3.0).to(tl.int32, bitcast=True) + 1
        tl.store(y + at, word.to(tl.float32, bitcast=True), mask=here)
    elif WHAT == "loop":
        for _ in range(3):
            a = tl.div_rn(a, 3.0) + 0.1
        tl.store(y + at, a, mask=here)
    elif WHAT == "pick":
        a = tl.div_rn(a, 3.0)
        tl.store(y + at, tl.where(a > 0.0, tl.maximum(a, 0.01), -a), mask=here)
    else:
        low = tl.div_rn(a, 3.0).to(tl.bfloat16).to(tl.float32)
        tl.store(y + at, (low + 1.0).to(tl.float16).to(tl.float32), mask=here)


def lifted(
    what: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, Lift, torch.Tensor]:
    x = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = torch.zeros(1 if what == "sum" else 300, dtype=torch.float32)
    scale = torch.tensor(0.3, dtype=torch.float64)
    twinstep.replay.activate()
    try:
        with lifting([x, y], [scale]) as lift:
            piece_kernel[(3,)](x, y, scale, 300, WHAT=what, BLOCK=128)
    finally:
        twinstep.replay.deactivate()
    return x.double(), lift, y


def third(x: torch.Tensor) -> torch.Tensor:
    return x / 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scalars_keep_their_rounding_and_data_has_none(dtype: torch.dtype) -> None:
    x, lift, y = lifted("copy", dtype)
    wide = lift.read(y)
    want = third(x) * torch.tensor(0.3, dtype=torch.float64).float().double()
    assert bool(wide.stored.all())
    assert bool(((wide.value - want).abs() <= 2.0**-51 * want.abs()).all())
    assert not torch.equal(wide.value, y.double())


def test_roundings_on_the_way_and_loops_leave_no_trace() -> None:
    x, lift, y = lifted("narrow")
    assert bool(((lift.read(y).value - (third(x) + 1.0)).abs() < 1e-15).all())
    assert bool(((y.double() - (third(x) + 1.0)).abs() > 1e-5).any())
    x, lift, y = lifted("loop")
    want = x
    for _ in range(3):
        # A literal is a scalar: fp32.
        want = third(want) + torch.tensor(0.1).double()
    assert bool(((lift.read(y).value - want).abs() < 1e-15).all())


def test_choices_follow_the_narrow_values() -> None:
    x, lift, y = lifted("pick")
    want = torch.where(x > 0, torch.maximum(third(x), torch.tensor(0.01).double()), -third(x))
    assert bool(((lift.read(y).value - want).abs() < 1e-16).all())


def test_sums_over_threads_and_blocks_are_lifted() -> None:
    x, lift, y = lifted("sum")
    want = (x * x).sum()
    assert abs(float(lift.read(y).value - want)) < 1e-12 * float(want)
    assert abs(float(y.double() - want)) > 1e-9 * float(want)


def test_arithmetic_on_bits_is_named_with_its_line() -> None:
    _, lift, y = lifted("trick")
    assert "add.s32" in lift.read(y).spoiled
    assert f"{__file__}:" in lift.read(y).spoiled


def test_what_the_host_writes_later_is_not_taken_for_stored() -> None:
    _, lift, y = lifted("copy")
    y[3] += 1.0
    wide = lift.read(y)
    assert not bool(wide.stored[3])
    assert float(wide.value[3]) == float(y[3])
    assert int(wide.stored.sum()) == 299


def test_a_kernel_runs_as_before_behind_a_lift() -> None:
    _, _, y = lifted("copy")
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    plain = torch.zeros(300)
    twinstep.replay.activate()
    try:
        scale = torch.tensor(0.3, dtype=torch.float64)
        piece_kernel[(3,)](x, plain, scale, 300, WHAT="copy", BLOCK=128)
    finally:
        twinstep.replay.deactivate()
    assert torch.equal(plain, y)


SUBJECTS: list[Entry | Variant] = [*corpus(), *harmless()]


def kernel_named(name: str) -> Kernel:
    return row_of(next(row for row in SUBJECTS if row.name == name))


def case_for(kernel: Kernel, dtype: str) -> Case:
    options = {row.name: row.choices[0] for row in kernel.operation.options}
    recipe = Recipe(layout="list", sizes=(300, 7), regime="ordinary", seed=3, options=options)
    return generate(operation_named(kernel.operation.name, "test"), dtype, recipe)


def broken(name: str, dtype: str, arithmetic: str = "") -> bool:
    kernel, engine = kernel_named(name), engine_named("replay")
    kernel = replace(kernel, arithmetic=arithmetic or kernel.arithmetic)
    with running(engine):
        plan = FORMULA.plan(case_for(kernel, dtype), kernel.arithmetic)
        return PlanRunner(kernel, engine).violation(plan) is not None


@pytest.mark.parametrize("name", ["triton_adamw", "triton_contracted", "triton_fast_division"])
def test_honest_arithmetic_has_the_specified_formula(name: str) -> None:
    assert not broken(name, "bf16")


def test_a_formula_below_bf16_is_seen_to_one_ulp_of_a_scalar_where_bits_are_claimed() -> None:
    assert broken("eps_one_ulp_too_large", "bf16-pure")
    assert not broken("eps_one_ulp_too_large", "bf16-pure", arithmetic="bounded")


@pytest.mark.parametrize(
    "name", ["eps_a_hundred_thousandth_too_large", "one_minus_beta2_formed_in_fp32"]
)
def test_a_bounded_formula_hidden_below_bf16_is_seen_past_the_bound(name: str) -> None:
    assert broken(name, "bf16-pure")


def test_a_truncating_cast_is_not_liftable_and_says_where() -> None:
    with pytest.raises(CannotJudge, match=r"not liftable: copies\[0\] derives from `.*triton_kern"):
        broken("triton_cast_truncates", "bf16")


@pytest.mark.parametrize("granules", [1, 2, 3, 4])
def test_a_word_of_64_bits_is_cut_at_any_of_its_16(granules: int) -> None:
    """As by a shift by 16, 32 or 48."""
    word = np.zeros((1, 1), SHADOW[4])
    word["w"][..., :] = range(4)
    part = sliced(word, 4 - granules, granules)
    assert part is not None
    assert part["w"].tolist() == [[[*range(4 - granules, 4)]]]
