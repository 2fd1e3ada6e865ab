"""State of few bits and of other shapes: drawn, bounded, compared and shrunk like any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.covering import covering_recipes
from twinstep.parity.cases.formats import FORMATS, finite_bits, integers, non_finite_bits, to_tensor
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.bounded import Bounded
from twinstep.parity.expected.carried import known
from twinstep.parity.expected.outputs import _accepted
from twinstep.parity.expected.ulp import ulp_distance
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.plan import Values
from twinstep.parity.operations.controls import FACTOR
from twinstep.parity.operations.operation import ListArgument, Operation, Role, Shape
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Cell, Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.registry.kernels import Kernel, register_operation, registrations
from twinstep.parity.runner.judge_cell import judge_cell
from twinstep.parity.runner.recipes import Effort

Tensors = list[Tensor]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAWS_OF_STATE = (
    "value",
    "nothing_else_written",
    "non_finite",
    "boundary_sizes",
    "alignment",
    "permutation",
    "sign_symmetry",
    "repeat",
)


@pytest.mark.parametrize("dtype", FP8)
def test_every_pattern_of_8_bits_is_finite_or_not_as_torch_has_it(dtype: torch.dtype) -> None:
    form = FORMATS[dtype]
    values = to_tensor(np.arange(256, dtype=np.uint8), form).float()
    magnitudes = np.arange(256) & (form.sign - 1)
    assert torch.equal(torch.isfinite(values), torch.from_numpy(magnitudes < form.infinity))
    finite = to_tensor(finite_bits(np.random.default_rng(1), 4000, form), form)
    assert bool(torch.isfinite(finite.float()).all())
    assert len(finite.float().unique()) == 2 * form.infinity - 1
    kinds = {name: np.array([bits]) for name, bits in non_finite_bits(form).items()}
    huge = to_tensor(kinds.pop("huge").astype(np.uint8), form)
    assert huge.float().item() == torch.finfo(dtype).max
    for bits in kinds.values():
        assert not torch.isfinite(to_tensor(bits.astype(np.uint8), form).float())


@pytest.mark.parametrize("dtype", FP8)
def test_the_distance_of_8_bit_floats_is_that_of_their_order(dtype: torch.dtype) -> None:
    every = to_tensor(np.arange(256, dtype=np.uint8), FORMATS[dtype])
    finite = every[torch.isfinite(every.float())].float().unique()
    below, above = finite[:-1].to(dtype), finite[1:].to(dtype)
    assert ulp_distance(below, above).tolist() == [1] * below.numel()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_are_drawn_from_end_to_end(dtype: torch.dtype) -> None:
    drawn = integers(np.random.default_rng(0), 4000, dtype)
    kind = torch.iinfo(dtype)
    assert drawn.dtype == dtype
    assert (int(drawn.min()), int(drawn.max())) == (kind.min, kind.max)


def accepted(change: Callable[[Tensor], Tensor], x: Tensor, error: float) -> Accepted:
    wide = torch.full_like(x, error, dtype=torch.float64)
    carried = replace(known(x), error=wide, computed=error > 0)
    changed = change(Bounded(carried))
    return _accepted(changed, changed)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_neighbours_of_a_code_are_open_only_where_a_tie_lies_inside(
    dtype: torch.dtype,
) -> None:
    x = torch.tensor([3.0, 3.499, 3.5, 3.501, 3.51, 300.0, torch.nan])
    row = accepted(lambda t: t.round().to(dtype), x, 0.0025)
    assert row.low is not None
    assert row.high is not None
    assert row.low.tolist()[:5] == [3, 2, 3, 3, 4]
    assert row.high.tolist()[:5] == [3, 4, 5, 5, 4]
    assert row.high.tolist()[6] == torch.iinfo(dtype).max
    assert (
        row.accepts(torch.tensor([3, 4, 4, 3, 4, 127, 0], dtype=dtype)).tolist()[:5] == [True] * 5
    )
    assert row.accepts(torch.tensor([4, 5, 6, 2, 3, 1, 0], dtype=dtype)).tolist()[:5] == [False] * 5


@pytest.mark.parametrize("dtype", FP8)
def test_an_8_bit_float_is_open_between_neighbours_only_at_a_tie(dtype: torch.dtype) -> None:
    every = to_tensor(np.arange(256, dtype=np.uint8), FORMATS[dtype])
    finite = every[torch.isfinite(every.float())].float().unique()
    low, high = finite[:-1], finite[1:]
    for at, may in ((low + 0.4 * (high - low), (True, False)), ((low + high) / 2, (True, True))):
        row = accepted(lambda t: (t * 1.0).to(dtype), at, 1e-9)
        found = row.accepts(low.to(dtype)), row.accepts(high.to(dtype))
        assert tuple(bool(mask.all()) for mask in found) == may
        ratio = row.ratio(low.to(dtype))
        assert ratio is not None
        assert float(ratio.max()) <= 1.0


@pytest.mark.parametrize(
    ("exact", "other"),
    [
        (lambda x: x.mean(1), lambda x: x.sum(1) / 65),
        (lambda x: x.sum(), lambda x: x.sum(0).flip(0).cumsum(0)[-1]),
        (lambda x: x.abs().amax(1, keepdim=True), lambda x: x.abs().max(1, keepdim=True).values),
        (lambda x: (x * 3).reshape(5, 7, 13)[1:, 2].sum(-1), lambda x: 3 * x[1:, 26:39].sum(1)),
    ],
)
def test_bounds_over_blocks_hold_for_another_order_and_not_for_other_values(
    exact: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    # Of one sign: a bound on a sum that cancels may be wider than a change of 0.1 %.
    x = torch.rand((7 if exact(torch.ones(5, 91)).dim() == 1 else 5, 65))
    x = torch.rand(5, 91) if "reshape" in exact.__code__.co_names else x
    row = accepted(exact, x, 0.0)
    assert bool(row.accepts(other(x)).all())
    assert not bool(row.accepts(exact(x * 1.001)).all())


def blocks(shape: Shape) -> Shape:
    return (-(-math.prod(shape) // 16),)


def columns(shape: Shape) -> Shape | None:
    return shape[1:] if len(shape) == 2 else None


def stated(
    params: Tensors, moments: Tensors, scales: Tensors, columns: Tensors, *, factor: Tensor
) -> tuple[Tensors, ...]:
    """Moments of 8 bits, a scale for 16 elements, and sums of the columns of matrices."""
    new = [m.float() * 0.5 + p * factor for p, m in zip(params, moments, strict=True)]
    own = [m.to(old.dtype) for m, old in zip(new, moments, strict=True)]
    return own, [s * 0.5 for s in scales], [c * 2 for c in columns]


def operation(dtype: torch.dtype, **changes: object) -> Operation:
    fp32 = (torch.float32,)
    fields: dict[str, object] = {
        "name": "stated",
        "summary": "",
        "equations": (),
        "lists": (
            ListArgument(name="params", role=Role.PARAM),
            ListArgument(name="moments", role=Role.MOMENT),
            ListArgument(name="scales", role=Role.SCALE, shape=blocks),
            ListArgument(name="columns", role=Role.SQUARE, shape=columns),
        ),
        "controls": (FACTOR,),
        "writes": ("moments", "scales", "columns"),
        "reference": stated,
        "combinations": {
            "few": {"params": fp32, "moments": (dtype,), "scales": fp32, "columns": fp32}
        },
        "laws": tuple(law for law in LAWS_OF_STATE if law != "permutation"),
    }
    return Operation(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with registrations():
        yield


def right(
    params: Tensors, moments: Tensors, scales: Tensors, columns: Tensors, *, factor: Tensor
) -> None:
    for p, m in zip(params, moments, strict=True):
        m.copy_(torch.addcmul(m.float() * 0.5, p, factor))
    for s in scales:
        s.mul_(0.5)
    for c in columns:
        c.mul_(2)


def by_truncation(
    params: Tensors, moments: Tensors, scales: Tensors, columns: Tensors, *, factor: Tensor
) -> None:
    old = [m.clone() for m in moments]
    right(params, moments, scales, columns, factor=factor)
    for p, m, was in zip(params, moments, old, strict=True):
        exact = was.float() * 0.5 + p * factor
        bits = m.view(torch.int8)
        m.view(torch.int8).copy_(torch.where(m.float().abs() > exact.abs(), bits - 1, bits))


def past_a_scale(
    params: Tensors, moments: Tensors, scales: Tensors, columns: Tensors, *, factor: Tensor
) -> None:
    right(params, moments, scales, columns, factor=factor)
    for s in scales:
        s.as_strided((1,), (1,), s.storage_offset() + s.numel()).zero_()


def last_column_left(
    params: Tensors, moments: Tensors, scales: Tensors, columns: Tensors, *, factor: Tensor
) -> None:
    right(params, moments, scales, columns, factor=factor)
    if columns:
        columns[-1].div_(2)


def empty_matrices_passed_over(
    params: Tensors, moments: Tensors, scales: Tensors, columns: Tensors, *, factor: Tensor
) -> None:
    right(params, moments, scales, columns, factor=factor)
    matrices = sum(p.dim() > 1 and p.numel() > 0 for p in params)
    for c in columns[matrices:]:
        c.div_(2)


def judged(
    function: Callable[..., object], law: str, dtype: torch.dtype = torch.float8_e4m3fn
) -> Cell:
    contract = register_operation(operation(dtype))
    kernel = Kernel(
        name=function.__name__,
        operation=contract,
        function=function,
        arithmetic="bounded",
        dtypes=("few",),
        layouts=contract.layouts,
        engines=("cpu",),
        place=f"{__file__}:1",
    )
    effort = Effort(examples=4, repros=None, shrink_seconds=0.2)
    return judge_cell(kernel, "few", LAWS[law], engine_named("cpu"), effort)


@pytest.mark.parametrize("law", [law for law in LAWS_OF_STATE if law != "permutation"])
def test_a_right_kernel_keeps_the_law(law: str) -> None:
    cell = judged(right, law, FP8[law != "value"])
    assert cell.status is Status.PASSED, cell.failure or cell.reason


@pytest.mark.parametrize("dtype", FP8)
def test_8_bit_floats_are_turned_end_for_end(dtype: torch.dtype) -> None:
    whole = operation(dtype)
    contract = replace(whole, lists=whole.lists[:2])
    case = generate(contract, "few", Recipe(layout="flat", sizes=(7,)))
    as_drawn, turned = (
        call.case.lists["moments"][0] for call in LAWS["permutation"].plan(case, "exact").calls
    )
    assert torch.equal(turned.view(torch.int8), as_drawn.view(torch.int8).flip(0))


@pytest.mark.parametrize(
    ("function", "law", "says"),
    [
        (by_truncation, "value", "1 ULP"),
        (past_a_scale, "nothing_else_written", "scales"),
        (last_column_left, "value", "columns"),
        (empty_matrices_passed_over, "boundary_sizes", "columns"),
    ],
)
def test_a_wrong_kernel_does_not(function: Callable[..., object], law: str, says: str) -> None:
    cell = judged(function, law)
    assert cell.status is Status.FAILED, cell.reason
    assert says in cell.failure


def drawn() -> Case:
    contract = register_operation(operation(torch.float8_e5m2))
    recipes = covering_recipes(contract, "few", ("list",), 12, None)
    recipe = next(row for row in recipes if len(row.sizes) > 3 and row.regime != "zeros")
    return generate(contract, "few", replace(recipe, dims=2, sizes=(12, 5, 0, 21, 11)))


def test_companions_follow_their_tensors_wherever_these_go() -> None:
    case = drawn()
    shapes = [tuple(t.shape) for t in case.lists["params"]]
    assert shapes == [(3, 4), (5, 1), (3, 0), (7, 3), (11, 1)]
    assert [tuple(t.shape) for t in case.lists["columns"]] == [(4,), (1,), (0,), (3,), (1,)]
    assert [t.numel() for t in case.lists["scales"]] == [1, 1, 0, 2, 1]
    assert bool((torch.cat(list(case.lists["scales"])) >= 0).all())
    moved = case.taken([3, 1, 0])
    assert [t.numel() for t in moved.lists["params"]] == [21, 5, 12]
    assert torch.equal(moved.lists["columns"][0], case.lists["columns"][3])
    assert torch.equal(moved.lists["scales"][0], case.lists["scales"][3])
    cut = case.with_lists({**case.lists, "params": [torch.ones(40), torch.ones(2, 9)]})
    assert [tuple(t.shape) for t in cut.lists["scales"]] == [(3,), (2,)]
    assert [tuple(t.shape) for t in cut.lists["columns"]] == [(9,)]


def places(memory: GuardedMemory) -> dict[str, int]:
    found = {name: tensor.data_ptr() for name, tensor in memory.named().items()}
    return {name: place for name, place in found.items() if "earlier" not in name}


@pytest.mark.parametrize("seed", [0, 1])
def test_calls_that_repeat_another_move_one_list_after_the_other(seed: int) -> None:
    case = drawn()
    case = generate(case.operation, "few", replace(case.recipe, seed=seed))
    calls = [call for call in LAWS["repeat"].plan(case, "exact").calls if call.reuse == 1]
    memory = GuardedMemory.of(case, torch.device("cpu"))
    at = [places(memory.renewed(call.case, call.moved)) for call in calls]
    moved = [
        {name.partition("[")[0] for name in new if new[name] != old[name]}
        for old, new in pairwise(at)
    ]
    names = ("params", "moments", "scales", "columns", "factor")
    assert [one for one in moved if one] == [{name} for name in names]


def test_tensors_of_one_size_exchange_their_places_and_others_their_sizes() -> None:
    contract = operation_named("unscale", "tests")
    case = generate(contract, "mixed", Recipe(layout="list", sizes=(7, 9, 7, 9, 7, 9, 9)))
    plan = LAWS["repeat"].plan(case, "exact")
    *_, first, last, other = plan.calls
    sizes = [[grad.numel() for grad in call.case.lists["grads"]] for call in (last, other)]
    assert sizes[0] != sizes[1]
    assert sizes[0][:9] == sizes[1][:9]
    assert sizes[0][-9:] == sizes[1][-9:]
    assert sorted(sizes[0]) == sorted(sizes[1])
    assert Values(call=len(plan.calls) - 1) in plan.checks
    memory = GuardedMemory.of(first.case, torch.device("cpu"))
    before = places(memory)
    after = places(memory.renewed(last.case, last.moved))
    assert sorted(after.values()) == sorted(before.values())
    assert {name.partition("[")[0] for name in before if before[name] != after[name]} == {"grads"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"laws": ("value", "splitting")}, "splitting cannot be judged where scales has shapes"),
        ({"laws": ("permutation",)}, "permutation cannot be judged where columns has shapes"),
        (
            {"lists": (ListArgument(name="params", role=Role.PARAM, shape=blocks),)},
            "should be the one that it follows from",
        ),
    ],
)
def test_laws_that_cut_what_belongs_together_are_refused(
    changes: dict[str, object], says: str
) -> None:
    wanted = operation(torch.float8_e5m2)
    if "lists" in changes:
        changes = {"lists": (*changes["lists"], *wanted.lists[1:])}  # type: ignore[misc]
    with pytest.raises(UsageError, match=says):
        register_operation(operation(torch.float8_e5m2, **changes))
