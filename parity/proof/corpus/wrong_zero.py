"""Classes after `ZeroOptimizer` that the judge must reject over ranks, with one fault each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.bucketed_zero import PRIVATE, Bucketed, Flight, Piece
from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.reference.arithmetic import fp32
from twinstep.reference.optimizers.zero import ZeroOptimizer
from twinstep.reference.optimizers.zero_groups import ZeroGroup

StateDict = dict[str, object]
Entries = Sequence[Any]
WRONG_ZERO: list[Optimizer] = []
ZERO = {"reference": "ZeroOptimizer", "dtypes": ("bf16",), "over_ranks": True}
HALF = {**ZERO, "dtypes": ("fp16",)}
BUCKETED = {**ZERO, "private": PRIVATE}


@put(WRONG_ZERO, "G01", **BUCKETED)
class FillsOneBuffer(Bucketed):
    """Goes on with the first buffer after every flush, while it is on its way."""

    def turn(self) -> None:
        self._turn = 0


@put(WRONG_ZERO, "G02", **BUCKETED)
class SendsTheRestAgain(Bucketed):
    """Does not empty the bucket after the last flush of a round."""

    def land_all(self) -> None:
        rest = [piece for flight in self._flights for piece in flight.pieces]
        super().land_all()
        self._pieces, self._filled = rest, sum(piece.numel for piece in rest)


@put(WRONG_ZERO, "G05", **BUCKETED)
class AveragesTheWholeBuffer(Bucketed):
    """Divides whatever lies in the buffer once more for each piece that is added to it."""

    def put(self, piece: Piece) -> None:
        super().put(piece)
        room = self.buffer(piece.group)
        room[: piece.at] = self.before(room[: piece.at].clone(), piece.group)


@put(WRONG_ZERO, "G10", **BUCKETED)
class MergesGroups(Bucketed):
    """Sends neighbours with one owner in one message, whatever process groups they have."""

    def together(self, one: Piece, other: Piece) -> bool:
        return one.owner == other.owner


@put(WRONG_ZERO, "G13", **BUCKETED)
class StitchesFromTheStart(Bucketed):
    """Takes the part of a parameter in a later partition from its beginning."""

    def source(self, piece: Piece) -> Tensor:
        sizes = accumulate((param.numel() for param in piece.group.params), initial=0)
        start = max(first for first in sizes if first <= piece.begin)
        return piece.group.accumulator[start : start + piece.numel]


@put(WRONG_ZERO, "G14", **BUCKETED)
class CountsFromMinusOne(Bucketed):
    """Overwrites sums with the first micro-batch, but counts these from -1 after a step."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self._micro = 0
        super().__init__(init_optimizer, **options)

    def add(self, piece: Piece, mean: Tensor) -> None:
        group = piece.group
        if self._micro == 0:
            first = piece.begin - group.rank * group.partition_size
            group.reduced[first : first + piece.numel] = 0
        super().add(piece, mean)

    def land_all(self) -> None:
        super().land_all()
        self._micro += 1

    def _clear_sums(self) -> None:
        super()._clear_sums()
        self._micro = -1


@put(WRONG_ZERO, "G20", **ZERO)
class ReducesWhatBackwardMakes(ZeroOptimizer):
    """Takes what a backward makes, and forgets what the parameters had before."""

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        for param in self._params():
            param.grad = None
        super().backward(loss, retain_graph, create_graph)


@put(WRONG_ZERO, "G22", **BUCKETED)
class ReadsBeforeItArrives(Bucketed):
    """Adds up a bucket that is still on its way."""

    def wait(self, flight: Flight) -> None:
        self._late = [*getattr(self, "_late", ()), *flight.works]

    def land_all(self) -> None:
        super().land_all()
        for work in self.__dict__.pop("_late", ()):
            work.wait()


@put(WRONG_ZERO, "G25", **BUCKETED)
class SendsInOrderOfArrival(Bucketed):
    """Sends gradients in the order in which backward has finished them on this rank."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(init_optimizer, **options)
        self._arrived: list[Tensor] = []
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._arrived.append)
            for param in self._params()
        ]

    def pieces(self) -> Iterator[Piece]:
        known = {id(param): at for at, param in enumerate(self._arrived)}
        found = list[tuple[int, Piece]]()
        for group in self.groups:
            ends = list(accumulate(param.numel() for param in group.params))
            for piece in self.pieces_of(group):
                param = group.params[bisect_right(ends, piece.begin)]
                found.append((known.get(id(param), len(known)), piece))
        yield from (piece for _, piece in sorted(found, key=lambda pair: pair[0]))

    def land_all(self) -> None:
        super().land_all()
        self._arrived.clear()


@put(WRONG_ZERO, "G26", **BUCKETED)
class CutsLongParameters(Bucketed):
    """Reduces no more of a parameter in one partition than a bucket holds."""

    def pieces_of(self, group: ZeroGroup) -> Iterator[Piece]:
        last = None
        for piece in super().pieces_of(group):
            full = last is not None and last.numel == self.limit
            if not (full and last is not None and last.end == piece.begin):
                yield piece
            last = piece


@put(WRONG_ZERO, **BUCKETED)
class GivesAllToTheFirstOwner(Bucketed):
    """Gives a parameter that lies in two partitions to the owner of the first."""

    def pieces_of(self, group: ZeroGroup) -> Iterator[Piece]:
        owners, start = dict[int, int](), 0
        for param in group.params:
            for element in range(start, start + param.numel()):
                owners[element] = start // group.partition_size
            start += param.numel()
        for piece in super().pieces_of(group):
            if owners[piece.begin] == piece.owner:
                yield piece


@put(WRONG_ZERO, **BUCKETED)
class WaitsForFrozenParameters(Bucketed):
    """Sends no bucket that has a parameter which is frozen."""

    def pieces_of(self, group: ZeroGroup) -> Iterator[Piece]:
        frozen, start = set[int](), 0
        for param in group.params:
            if not param.requires_grad:
                frozen.update(range(start, start + param.numel()))
            start += param.numel()
        yield from (p for p in super().pieces_of(group) if p.begin not in frozen)


@put(WRONG_ZERO, **BUCKETED)
class SendsWithoutTheRest(Bucketed):
    """Sends buckets that are full, and no rest."""

    def flush(self) -> None:
        if self._filled and self._filled < min(self.limit, 24):
            self._pieces, self._filled = [], 0
        super().flush()


@put(WRONG_ZERO, **BUCKETED)
class DividesTwice(Bucketed):
    """Divides before the sum over ranks, and after it again."""

    def after(self, received: Tensor, group: ZeroGroup) -> Tensor:
        if self.options.gradient_average and self.options.reduce_scatter:
            return (fp32(received) / group.divisor).to(received.dtype)
        return super().after(received, group)


@put(WRONG_ZERO, **BUCKETED)
class PredividesTwice(Bucketed):
    """Multiplies by the predivide factor twice after the sum over ranks."""

    def after(self, received: Tensor, group: ZeroGroup) -> Tensor:
        found = super().after(received, group)
        factor = self.options.gradient_predivide_factor
        return found if factor == 1.0 else (fp32(found) * factor).to(found.dtype)


@put(WRONG_ZERO, **BUCKETED)
class OwnsWithoutPadding(Bucketed):
    """Cuts gradients into partitions of the elements without padding."""

    def end_of_partition(self, group: ZeroGroup, element: int) -> int:
        size = max(-(-group.numel // group.world), 1)
        return min((element // size + 1) * size, super().end_of_partition(group, element))

    def add(self, piece: Piece, mean: Tensor) -> None:
        size = max(-(-piece.group.numel // piece.group.world), 1)
        if piece.begin // size == piece.owner:
            super().add(piece, mean)
