"""Simulated ranks: every collective of torch.distributed against a formula of one process."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.parity.ranks.arithmetic import ORDERS, Operation, reduced
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

TORCH: Any = dist  # exports without saying so
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int32, torch.int64)
FACTOR = 0.5
Values = list[list[int]]  # by rank and element


def premultiplied() -> Any:
    return TORCH._make_nccl_premul_sum(FACTOR)


# Results of one element over all ranks, in Python's numbers.
FORMULAS: dict[str, Callable[[Sequence[int]], Fraction]] = {
    "SUM": lambda xs: Fraction(sum(xs)),
    "AVG": lambda xs: Fraction(sum(xs), len(xs)),
    "PRODUCT": lambda xs: Fraction(math.prod(xs)),
    "MIN": lambda xs: Fraction(min(xs)),
    "MAX": lambda xs: Fraction(max(xs)),
    "BAND": lambda xs: Fraction(functools.reduce(operator.and_, xs)),
    "BOR": lambda xs: Fraction(functools.reduce(operator.or_, xs)),
    "BXOR": lambda xs: Fraction(functools.reduce(operator.xor, xs)),
    "PREMUL_SUM": lambda xs: sum(xs) * Fraction(FACTOR),
}


@dataclass(frozen=True)
class Example:
    """A world, and what its ranks bring; all sums and products are exact in every dtype."""

    world: World
    dtype: torch.dtype
    op: str
    values: Values
    root: int
    is_async: bool

    def tensor(self, rank: int) -> Tensor:
        """The tensor that a rank brings."""
        return torch.tensor(self.values[rank], dtype=self.dtype)

    def reduced(self) -> list[float]:
        """All of that, reduced."""
        exact = [FORMULAS[self.op](column) for column in zip(*self.values, strict=True)]
        if self.dtype in INTEGERS:
            return [math.trunc(x) for x in exact]
        return torch.tensor([float(x) for x in exact], dtype=torch.float64).to(self.dtype).tolist()

    def options(self) -> dict[str, Any]:
        """Arguments of a reduction."""
        op = premultiplied() if self.op == "PREMUL_SUM" else getattr(dist.ReduceOp, self.op)
        return {"op": op, "async_op": self.is_async}


@st.composite
def examples(draw: st.DrawFn) -> Example:
    size = draw(st.integers(1, 5))
    of_bits = ("BAND", "BOR", "BXOR")
    op = draw(st.sampled_from(sorted(FORMULAS)))
    allowed = INTEGERS if op in of_bits else FLOATS if op == "PREMUL_SUM" else FLOATS + INTEGERS
    count = size * draw(st.integers(0, 3))
    row = st.lists(st.integers(1, 3), min_size=count, max_size=count)
    world = World(
        size,
        seed=draw(st.integers(0, 99)),
        order=draw(st.sampled_from(sorted(ORDERS))),
        late=draw(st.booleans()),
    )
    return Example(
        world,
        draw(st.sampled_from(allowed)),
        op,
        [draw(row) for _ in range(size)],
        draw(st.integers(0, size - 1)),
        draw(st.booleans()),
    )


Call = Callable[[Example, Rank, Tensor], tuple[Any, Any]]


def empties(example: Example, of: Tensor) -> list[Tensor]:
    return [torch.empty_like(of) for _ in range(example.world.size)]


def all_reduce(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    return dist.all_reduce(own, **example.options()), own


def all_reduce_coalesced(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    first, second = own[:1].clone(), own[1:].clone()
    work = TORCH.all_reduce_coalesced([first, second], **example.options())
    return work, [first, second]


def reduce(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    work = dist.reduce(own, dst=example.root, **example.options())
    return work, own if rank.number == example.root else []


def reduce_scatter_list(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    pieces = [piece.clone() for piece in own.chunk(example.world.size)] if own.numel() else []
    pieces = pieces or empties(example, own)
    out = torch.empty_like(pieces[0])
    return dist.reduce_scatter(out, pieces, **example.options()), out


def reduce_scatter_tensor(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    out = own.new_empty(own.numel() // example.world.size)
    return dist.reduce_scatter_tensor(out, own, **example.options()), out


def reduce_scatter_in_place(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    share = own.numel() // example.world.size
    out = own[rank.number * share : (rank.number + 1) * share]
    return dist.reduce_scatter_tensor(out, own, **example.options()), out


def broadcast(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    return dist.broadcast(own, src=example.root, async_op=example.is_async), own


def all_gather(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    outs = empties(example, own)
    return dist.all_gather(outs, own, async_op=example.is_async), outs


def all_gather_into_tensor(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    out = own.new_empty(own.numel() * example.world.size)
    return dist.all_gather_into_tensor(out, own, async_op=example.is_async), out


def all_gather_in_place(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    out = own.new_empty(example.world.size, own.numel())
    out[rank.number] = own
    return dist.all_gather_into_tensor(out, out[rank.number], async_op=example.is_async), out


def gather(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    outs = empties(example, own) if rank.number == example.root else None
    return dist.gather(own, outs, dst=example.root, async_op=example.is_async), outs or []


def scatter(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    out = torch.empty_like(own)
    given = [own + at for at in range(example.world.size)] if rank.number == example.root else None
    return dist.scatter(out, given, src=example.root, async_op=example.is_async), out


def all_to_all(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    outs = empties(example, own)
    given = [own + at for at in range(example.world.size)]
    return dist.all_to_all(outs, given, async_op=example.is_async), outs


def all_to_all_single(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    """Rank r sends r + 1 copies of what it has, in rows, to each."""
    size, rows = example.world.size, rank.number + 1
    given = own.repeat(rows * size, 1)
    out = own.new_empty(sum(range(1, size + 1)), own.numel())
    work = dist.all_to_all_single(
        out, given, list(range(1, size + 1)), [rows] * size, async_op=example.is_async
    )
    return work, out


def all_gather_coalesced(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    halves = [own[:1].clone(), own[1:].clone()]
    outs = [[torch.empty_like(half) for half in halves] for _ in range(example.world.size)]
    work = TORCH.all_gather_coalesced(outs, halves, async_op=example.is_async)
    return work, flattened(outs)


def coalesced(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    """Two reduce-scatters in one."""
    outs = [own.new_empty(own.numel() // example.world.size) for _ in range(2)]
    op = example.options()["op"]
    with TORCH.distributed_c10d._coalescing_manager(rank.group("data"), async_ops=True) as both:
        for out in outs:
            dist.reduce_scatter_tensor(out, own, op, group=rank.group("data"))
    return both, outs


def ring_of_messages(example: Example, rank: Rank, own: Tensor) -> tuple[Any, Any]:
    size, out = example.world.size, torch.empty_like(own)
    if size == 1:
        return None, own
    to, source = (rank.number + 1) % size, (rank.number - 1) % size
    if example.is_async:
        pair = dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, out, source)
        works = TORCH.batch_isend_irecv(list(pair))
    else:
        works = [dist.isend(own, dst=to, tag=7), dist.irecv(out, src=source, tag=7)]
    for work in reversed(works):
        work.wait()
    return None, out


def share(example: Example, rank: int) -> list[float]:
    size = len(example.values[0]) // example.world.size
    return example.reduced()[rank * size : (rank + 1) * size]


def added(row: Sequence[int], number: int) -> list[int]:
    return [x + number for x in row]


def flattened(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [x for row in rows for x in row]


# Each with what a rank then has, all outputs in a row.
WANTED: dict[Call, Callable[[Example, int], Sequence[float]]] = {
    all_reduce: lambda e, rank: e.reduced(),
    all_reduce_coalesced: lambda e, rank: e.reduced(),
    reduce: lambda e, rank: e.reduced() if rank == e.root else [],
    reduce_scatter_list: share,
    reduce_scatter_tensor: share,
    reduce_scatter_in_place: share,
    broadcast: lambda e, rank: e.values[e.root],
    all_gather: lambda e, rank: flattened(e.values),
    all_gather_coalesced: lambda e, rank: flattened(e.values),
    coalesced: lambda e, rank: [*share(e, rank)] * 2,
    all_gather_into_tensor: lambda e, rank: flattened(e.values),
    all_gather_in_place: lambda e, rank: flattened(e.values),
    gather: lambda e, rank: flattened(e.values) if rank == e.root else [],
    scatter: lambda e, rank: added(e.values[e.root], rank),
    all_to_all: lambda e, rank: flattened([added(row, rank) for row in e.values]),
    all_to_all_single: lambda e, rank: flattened(
        [row * (source + 1) for source, row in enumerate(e.values)]
    ),
    ring_of_messages: lambda e, rank: e.values[rank - 1],
}


@pytest.mark.parametrize("call", WANTED, ids=lambda call: call.__name__)
@settings(max_examples=40)
@given(example=examples())
def test_a_collective_gives_what_its_formula_gives(call: Call, example: Example) -> None:
    def run(rank: Rank) -> list[float]:
        own = example.tensor(rank.number)
        work, outs = call(example, rank, own)
        if work is not None:
            work.wait()
        outs = outs if isinstance(outs, list) else [outs]
        return [x for out in outs for x in out.flatten().tolist()]

    found = example.world.run(run)
    assert found == [list(WANTED[call](example, rank)) for rank in range(example.world.size)]


def test_objects_go_through_tensors() -> None:
    def run(rank: Rank) -> list[Any]:
        group, mine = rank.group("data"), {"rank": rank.number, "of": "x" * rank.number}
        gathered: list[Any] = [None] * 3
        dist.all_gather_object(gathered, mine, group=group)
        told: list[Any] = [mine]
        dist.broadcast_object_list(told, src=2, group=group)
        at_root: list[Any] | None = [None] * 3 if rank.number == 1 else None
        dist.gather_object(mine, at_root, dst=1, group=group)
        dealt: list[Any] = [None]
        dist.scatter_object_list(dealt, ["a", "b", "c"], src=0, group=group)
        return [gathered, told, at_root, dealt]

    all_of_them = [{"rank": rank, "of": "x" * rank} for rank in range(3)]
    for rank, (gathered, told, at_root, dealt) in enumerate(World(3).run(run)):
        assert gathered == all_of_them
        assert told == [all_of_them[2]]
        assert at_root == (all_of_them if rank == 1 else None)
        assert dealt == ["abc"[rank]]


# Four ranks of which the first brings 2048, where fp16 rounds odd numbers to a multiple of 4.
BY_ORDER = {
    "ranks": [2048.0] * 4,
    "ring": [2052.0, 2052.0, 2048.0, 2048.0],
    "tree": [2050.0] * 4,
    "halving": [2050.0] * 4,
}


@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_rounded_to_the_dtype_at_each_hop_of_an_order(order: str) -> None:
    parts = [torch.full((4,), x, dtype=torch.float16) for x in (2048.0, 1.0, 1.0, 1.0)]
    assert reduced(parts, [Operation("SUM")] * 4, order).tolist() == BY_ORDER[order]


def test_the_orders_of_five_ranks_are_those_of_their_algorithms() -> None:
    """Strings instead of tensors: who joins whom."""
    names = {
        "ranks": "((((a+b)+c)+d)+e)",
        "tree": "(((a+b)+c)+(d+e))",
        "halving": "(((a+e)+c)+(b+d))",
    }
    for order, wanted in names.items():
        algorithm: Any = ORDERS[order]
        assert algorithm(list("abcde"), lambda a, b: f"({a}+{b})") == wanted


@pytest.mark.parametrize("order", ORDERS)
def test_all_ranks_get_the_same_bits_in_any_order(order: str) -> None:
    def run(rank: Rank) -> list[int]:
        own = torch.randn(33, generator=rank.generator).half()
        dist.all_reduce(own)
        return own.view(torch.int16).tolist()

    found = [World(5, seed=seed, order=order).run(run) for seed in range(6)]
    assert all(ranks == ranks[:1] * 5 for ranks in found)
    assert len({str(ranks[0]) for ranks in found}) == 6  # values are drawn from the seed


@pytest.mark.parametrize("order", ORDERS)
def test_places_in_a_reduction_are_drawn_once_for_each_group(order: str) -> None:
    """In the order of ranks, where 2048 swallows each 1 after it, nothing is drawn."""

    def run(rank: Rank) -> list[float]:
        value = (2048.0, 1.0, 1.0, -2048.0)[rank.number]
        own = [torch.tensor(value).half() for _ in range(3)]
        for tensor in own:
            dist.all_reduce(tensor)
        return [tensor.item() for tensor in own]

    found = [World(4, seed=seed, order=order).run(run)[0] for seed in range(12)]
    assert all(sums == sums[:1] * 3 for sums in found)
    sums = {row[0] for row in found}
    assert sums == {0.0} if order == "ranks" else len(sums) > 1


def test_each_rank_has_a_factor_of_its_own() -> None:
    def run(rank: Rank) -> float:
        own = torch.tensor(1.0)
        dist.all_reduce(own, op=TORCH._make_nccl_premul_sum(float(10**rank.number)))
        return own.item()

    for seed in range(4):
        assert World(3, seed=seed, order="ring").run(run) == [111.0] * 3


def test_floats_of_eight_bits_are_added_and_divided() -> None:
    def run(rank: Rank) -> list[float]:
        own = torch.full((2,), 0.5 + rank.number).to(torch.float8_e5m2)
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        return own.float().tolist()

    assert World(2).run(run) == [[1.0, 1.0]] * 2


def test_a_nan_is_neither_the_minimum_nor_lost() -> None:
    def run(rank: Rank) -> float:
        own = torch.tensor(math.nan if rank.number == 1 else 1.0)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own.item()

    assert all(math.isnan(x) for x in World(3).run(run))
