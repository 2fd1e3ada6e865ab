"""Rules of bounds: each encloses what an honest implementation may make of honest operands."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.helpers.bound_samples import SAMPLES
from twinstep.parity.cli.bounds_page import render
from twinstep.parity.expected.bounded import Bounded, NotBounded, charged
from twinstep.parity.expected.bounds_composed import COMPOSED
from twinstep.parity.expected.bounds_table import CREATORS, FAMILY_OF
from twinstep.parity.expected.carried import Carried, known
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.controls import LR
from twinstep.parity.operations.operation import ListArgument, Operation, Role
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel, register_operation, registrations
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "bounds.md"
EFFORT = Effort(repros=None, shrink_seconds=0.0)


@pytest.fixture(scope="module")
def lions() -> dict[str, Kernel]:
    with registrations() as found:
        runpy.run_path(str(ROOT / "examples" / "lion_operation.py"))
    return {row.name: replace(row, arithmetic="bounded", engines=("cpu",)) for row in found}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "status"), [("right_lion", Status.PASSED), ("wrong_lion", Status.FAILED)]
)
def test_a_step_by_signs_is_judged_as_bounded(
    lions: dict[str, Kernel], name: str, status: Status, dtype: str
) -> None:
    cell = judge_cell(lions[name], dtype, LAWS["value"], engine_named("cpu"), EFFORT)
    assert cell.status is status, cell.failure or cell.reason


TRITON = """
import triton
import triton.language as tl

from twinstep.parity import register


@triton.jit
def lion_kernel(p, g, m, c, numbers, n, COPY: tl.constexpr, SWAPPED: tl.constexpr):
    at = tl.program_id(0) * 512 + tl.arange(0, 512)
    here = at < n
    lr, decay, factor = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    one = tl.load(numbers + (5 if SWAPPED else 3))
    b1 = tl.load(numbers + (6 if SWAPPED else 4))
    b2 = tl.load(numbers + (4 if SWAPPED else 6))
    two = tl.load(numbers + (3 if SWAPPED else 5))
    old = tl.load(m + at, mask=here)
    grad = tl.load(g + at, mask=here).to(tl.float32) * factor
    c1 = b1 * old + one * grad
    sign = tl.where(c1 > 0, 1.0, tl.where(c1 < 0, -1.0, 0.0))
    weight = tl.load(p + at, mask=here).to(tl.float32)
    weight -= lr * (sign + decay * weight)
    tl.store(p + at, weight, mask=here)
    tl.store(m + at, b2 * old + two * grad, mask=here)
    if COPY:
        tl.store(c + at, weight, mask=here)


def step(params, grads, exp_avgs, copies, steps, *, swapped, lr, beta1, beta2, weight_decay,
         factor, found_inf):
    if found_inf.item() != 0:
        return
    one, two = 1 - beta1, 1 - beta2
    row = (lr, weight_decay, factor, one, beta1, two, beta2)
    row = [x.float().reshape(1) for x in row]
    numbers = torch.cat(row)
    for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        steps[i] += 1
        if p.numel():
            c = copies[i] if copies else p
            grid = (triton.cdiv(p.numel(), 512),)
            lion_kernel[grid](p, g, m, c, numbers, p.numel(), COPY=bool(copies), SWAPPED=swapped)


@register("lion_step", name="triton_lion", dtypes=("bf16", "fp32"))
def triton_lion(params, grads, exp_avgs, copies, steps, *, lr, beta1, beta2, weight_decay, factor,
                found_inf):
    step(params, grads, exp_avgs, copies, steps, swapped=False, lr=lr, beta1=beta1, beta2=beta2,
         weight_decay=weight_decay, factor=factor, found_inf=found_inf)


@register("lion_step", name="triton_lion_swapped", dtypes=("bf16", "fp32"))
def triton_lion_swapped(params, grads, exp_avgs, copies, steps, *, lr, beta1, beta2, weight_decay,
                        factor, found_inf):
    step(params, grads, exp_avgs, copies, steps, swapped=True, lr=lr, beta1=beta1, beta2=beta2,
         weight_decay=weight_decay, factor=factor, found_inf=found_inf)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    file = tmp_path_factory.mktemp("lion") / "triton_lion.py"
    file.write_text((ROOT / "examples" / "lion_operation.py").read_text() + TRITON)
    with registrations() as found:
        runpy.run_path(str(file))
    return {row.name: row for row in found}


@pytest.mark.parametrize(
    ("name", "laws", "status"),
    [
        ("triton_lion", ("value", "non_finite", "boundary_sizes", "formula"), Status.PASSED),
        ("triton_lion_swapped", ("value",), Status.FAILED),
    ],
)
def test_lion_in_triton_is_accepted_and_rejected_with_betas_swapped(
    compiled: dict[str, Kernel], name: str, laws: tuple[str, ...], status: Status
) -> None:
    session = Session(
        selection=Selection(laws=laws, dtypes=("bf16", "fp32"), engine="replay"), effort=EFFORT
    )
    for cell in session.run([compiled[name]]).cells.values():
        assert cell.status is status, cell.failure or cell.reason


def drawn(rng: torch.Generator, domain: tuple[float, float]) -> Tensor:
    """Numbers of a domain: of a grid, on which comparisons and steps decide, and between."""
    low, high = domain
    x = torch.rand(4, 6, generator=rng) * (high - low) + low
    grid = (x * 2).round() / 2
    usable = (torch.rand(4, 6, generator=rng) < 0.4) & (grid > low) & (grid < high)
    return torch.where(usable, grid, x)


def carrying(rng: torch.Generator, domain: tuple[float, float]) -> tuple[Bounded, Tensor, Tensor]:
    """Numbers with errors, of a quarter none, and what they are."""
    x = drawn(rng, domain)
    error = 10.0 ** (torch.rand(4, 6, generator=rng, dtype=torch.float64) * 6 - 8)
    error = torch.where(torch.rand(4, 6, generator=rng) < 0.25, 0.0, error)
    return Bounded(replace(known(x), error=error, computed=True)), x.double(), error


def parts(result: object) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def carried(x: Tensor) -> Carried:
    return charged(x) if isinstance(x, Bounded) else known(x)


def points(
    rng: torch.Generator, rows: list[tuple[Bounded, Tensor, Tensor]]
) -> Iterator[list[Tensor]]:
    """Numbers of the operands' intervals: all ends, and some between."""
    for number in range(24):
        share = torch.rand(len(rows), 4, 6, generator=rng, dtype=torch.float64) * 2 - 1
        share = share.sign() if number < 12 else share
        share = torch.full_like(share, 1.0 - 2 * number) if number < 2 else share
        yield [x + e * s for (_, x, e), s in zip(rows, share, strict=True)]


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_image_of_every_number_of_the_operands_is_accepted(name: str) -> None:
    sample = SAMPLES[name]
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        rows = [carrying(rng, domain) for domain in sample.domains]
        bounds = [carried(x) for x in parts(sample.call(*(bounded for bounded, _, _ in rows)))]
        reach = [torch.zeros_like(c.exact) for c in bounds]
        scale = max(float(x.abs().max()) for _, x, _ in rows)
        assert bounds
        for numbers in points(rng, rows):
            single = [
                torch.where((n.float().double() - x).abs() <= e, n.float(), x.float())
                for n, (_, x, e) in zip(numbers, rows, strict=True)
            ]
            for operands in (numbers, single):
                truths = [x.double() for x in parts(sample.call(*operands))]
                for at, (truth, c) in enumerate(zip(truths, bounds, strict=True)):
                    away = (truth - c.exact).abs()
                    slack = 1e-13 * (truth.abs() + scale)
                    assert bool((away <= c.error + slack).all()), (name, seed)
                    reach[at] = torch.maximum(reach[at], away)
        for c, found in zip(bounds, reach, strict=True):
            wide = c.error > 16 * found + 2.0**-17 * (c.exact.abs() + scale)
            wide &= torch.isfinite(c.error)
            # Sums do not show the worst of all signs at once.
            assert float(wide.double().mean() if wide.numel() else 0.0) <= 0.25, (name, seed)


def test_every_operator_of_the_table_is_tried() -> None:
    assert SAMPLES.keys() == FAMILY_OF.keys() | COMPOSED.keys() | CREATORS | {"copy", "fill"}


def test_page_of_bounds_is_current() -> None:
    assert PAGE.read_text() == render(), (
        "run python -m twinstep.parity.cli.bounds_page > docs/reference/bounds.md"
    )


def test_what_is_written_in_place_or_over_lists_has_the_bound_of_what_is_not() -> None:
    rng = torch.Generator().manual_seed(1)
    (a, _, _), (b, _, _) = carrying(rng, (-3.0, 3.0)), carrying(rng, (-3.0, 3.0))
    wanted = carried(a * 0.9 + 0.1 * b)
    inside = a.clone()
    inside.mul_(0.9).add_(0.1 * b)
    (listed,) = torch._foreach_add(torch._foreach_mul([a], 0.9), [b], alpha=0.1)
    for made in (inside, listed):
        assert torch.equal(carried(made).exact, wanted.exact)
        assert torch.equal(carried(made).error, wanted.error)
    filled = a.clone()
    filled[torch.arange(4) > 1] = 0.5
    assert torch.equal(carried(filled).error[:2], carried(a).error[:2])
    assert not bool(carried(filled).error[2:].any())


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda x: torch.special.i0(x), "aten.i0.default has no error bound"),
        (lambda x: x.view(-1).mul_(2), "aten.mul_.Tensor writes into a view"),
        (lambda x: torch.zeros(4, 6).copy_(x), "into a tensor that carries no bound"),
        (lambda x: x.sum().item(), "takes a rounded number out of its tensor"),
        (lambda x: x[:, x.argmax(1)], "a place that rounding may change"),
        (lambda x: x.view(torch.int32), "aten.view.dtype has no error bound"),
    ],
)
def test_what_has_no_bound_is_named(refused: Callable[[Tensor], object], says: str) -> None:
    bounded, _, _ = carrying(torch.Generator().manual_seed(1), (-3.0, 3.0))
    with pytest.raises(NotBounded, match=re.escape(says)):
        refused(bounded)


def without_bound(params: list[Tensor], *, lr: Tensor) -> tuple[list[Tensor]]:
    return ([p - lr.float() * torch.special.i0(p) for p in params],)


def bessel(params: list[Tensor], *, lr: Tensor) -> None:
    for p, new in zip(params, without_bound(params, lr=lr)[0], strict=True):
        p.copy_(new)


def test_an_operation_without_bounds_says_that_it_can_be_exact() -> None:
    combination = {"params": (torch.float32,)}
    with registrations():
        contract = register_operation(
            Operation(
                name="bessel_step",
                summary="",
                equations=(),
                lists=(ListArgument(name="params", role=Role.PARAM),),
                controls=(LR,),
                writes=("params",),
                reference=without_bound,
                combinations={"fp32": combination},
                laws=("value",),
            )
        )
    kernel = Kernel(
        name="bessel",
        operation=contract,
        function=bessel,
        arithmetic="bounded",
        dtypes=("fp32",),
        layouts=("list",),
        engines=("cpu",),
        place=f"{__file__}:1",
    )
    cell = judge_cell(kernel, "fp32", LAWS["value"], engine_named("cpu"), EFFORT)
    assert cell.status is Status.CANNOT_JUDGE
    assert cell.reason == (
        "bessel_step cannot be judged as bounded: in its reference aten.i0.default has no error "
        'bound; use arithmetic="exact"'
    )
    exact = judge_cell(
        replace(kernel, arithmetic="exact"), "fp32", LAWS["value"], engine_named("cpu"), EFFORT
    )
    assert exact.status is Status.PASSED, exact.failure or exact.reason
