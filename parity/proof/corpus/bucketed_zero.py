"""ZeroOptimizer with gradients in buckets, in plain torch; other reductions are made of its parts.

Pieces of gradients are copied into one of two buffers, each piece within one partition. A full
buffer is divided and sent, one message for all neighbours with one owner in one process group, and
the other one is filled meanwhile. All ranks send the same pieces in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.tensors import check_dense_gradients
from twinstep.reference.arithmetic import float64, fp32
from twinstep.reference.optimizers.zero import ZeroOptimizer
from twinstep.reference.optimizers.zero_groups import ZeroGroup

PRIVATE = (
    "_flights",
    "_buffers",
    "_turn",
    "_pieces",
    "_filled",
    "_micro",
    "_arrived",
    "_hooks",
    "_starts",
    "_late",
)
# Elements of a buffer.
LONGEST = 4096


@dataclass(eq=False)
class Piece:
    """A run of elements of one parameter in one partition.

    Attributes:
        group: of the parameter.
        begin: first element in the flat layout.
        end: the one after the last.
        owner: rank in the group whose partition it is.
        at: place in the bucket.
    """

    group: ZeroGroup
    begin: int
    end: int
    owner: int
    at: int = 0

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.begin


@dataclass(eq=False)
class Flight:
    """A bucket on its way.

    Attributes:
        buffer: that was sent.
        pieces: in it.
        works: to be waited for.
    """

    buffer: Tensor
    pieces: list[Piece]
    works: list[dist.Work] = field(default_factory=list)


class Bucketed(ZeroOptimizer):
    """Reduces gradients bucket by bucket to their owners, from two buffers in turn."""

    def __init__(self, init_optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self._flights: list[Flight] = []
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        self._pieces: list[Piece] = []
        self._turn = self._filled = 0
        super().__init__(init_optimizer, **options)

    def _reduce(self, ready: Callable[[], None]) -> None:
        def check() -> None:
            ready()
            check_dense_gradients(self._params(), "Bucketed")

        on_all_ranks(check, self.ranks, self.groups[0].master.device)
        self._take()
        for piece in self.pieces():
            self.put(piece)
        self.flush()
        self.land_all()
        for group in self.groups:
            group.accumulator.zero_()

    def pieces(self) -> Iterator[Piece]:
        """All pieces, in the order in which they are sent: by owner."""
        found = [piece for group in self.groups for piece in self.pieces_of(group)]
        yield from sorted(found, key=lambda piece: piece.owner)

    def pieces_of(self, group: ZeroGroup) -> Iterator[Piece]:
        """Pieces of a group, none longer than a bucket."""
        start = 0
        for param in group.params:
            end = start + param.numel()
            while start < end:
                stop = min(end, self.end_of_partition(group, start), start + self.limit)
                yield Piece(group, start, stop, start // group.partition_size)
                start = stop

    def end_of_partition(self, group: ZeroGroup, element: int) -> int:
        """The first element after the partition that an element is in."""
        return (element // group.partition_size + 1) * group.partition_size

    @property
    def limit(self) -> int:
        """Elements of a bucket."""
        return min(int(self.options.reduce_bucket_size), LONGEST)

    def wire(self, group: ZeroGroup) -> torch.dtype:
        """The dtype of the wire."""
        return self.options.communication_data_type or group.flat.dtype

    def source(self, piece: Piece) -> Tensor:
        """Gradients of this rank that a piece is made of."""
        return piece.group.accumulator[piece.begin : piece.end]

    def put(self, piece: Piece) -> None:
        """Copy a piece into the bucket, which is sent if it is full, or of another kind."""
        before = self._pieces[-1].group if self._pieces else piece.group
        other = self.wire(before) != self.wire(piece.group) or before.divisor != piece.group.divisor
        if other or self._filled + piece.numel > self.limit:
            self.flush()
        piece.at = self._filled
        room = self.buffer(piece.group)[piece.at : piece.at + piece.numel]
        room.copy_(self.before(self.source(piece), piece.group))
        self._pieces.append(piece)
        self._filled += piece.numel

    def buffer(self, group: ZeroGroup) -> Tensor:
        """The buffer that is filled; whatever was on its way from it has landed."""
        wire = self.wire(group)
        if wire not in self._buffers:
            self._buffers[wire] = [torch.zeros(LONGEST, dtype=wire) for _ in range(2)]
        return self._buffers[wire][self._turn]

    def before(self, grad: Tensor, group: ZeroGroup) -> Tensor:
        """Gradients as they are sent."""
        options, wire = self.options, self.wire(group)
        if not options.gradient_average:
            return grad.to(wire)
        if options.reduce_scatter or not options.postscale_gradients:
            return (fp32(grad) / fp32(float64(group.divisor))).to(wire)
        return (fp32(grad.to(wire)) * fp32(float64(1.0 / options.gradient_predivide_factor))).to(
            wire
        )

    def after(self, received: Tensor, group: ZeroGroup) -> Tensor:
        """The mean of what was received."""
        options = self.options
        first = options.reduce_scatter or not options.postscale_gradients
        if first or not options.gradient_average:
            return received
        factor = options.gradient_predivide_factor / group.divisor
        return (fp32(received) * fp32(float64(factor))).to(received.dtype)

    def flush(self) -> None:
        """Send the bucket, and fill the other buffer from its beginning."""
        if self._pieces:
            flight = Flight(self.buffer(self._pieces[0].group), self._pieces)
            self._flights.append(flight)
            for run in self.runs(self._pieces):
                self.send(flight, run)
        self._pieces, self._filled = [], 0
        self.turn()
        while len(self._flights) > 1:
            self.land(self._flights.pop(0))

    def turn(self) -> None:
        """Go on with the other buffer."""
        self._turn = 1 - self._turn

    def runs(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Neighbours that go in one message."""
        found: list[list[Piece]] = []
        for piece in pieces:
            last = found[-1][-1] if found else None
            if last is not None and self.together(last, piece):
                found[-1].append(piece)
            else:
                found.append([piece])
        return found

    def together(self, one: Piece, other: Piece) -> bool:
        """True if two neighbours in a bucket go in one message."""
        same = one.group.process_group is other.group.process_group
        return same and one.owner == other.owner

    def send(self, flight: Flight, run: list[Piece]) -> None:
        """Start a message."""
        ranks = run[0].group.process_group
        if ranks is None:
            return
        part = flight.buffer[run[0].at : run[-1].at + run[-1].numel]
        work = dist.reduce(part, group=ranks, group_dst=run[0].owner, async_op=True)
        assert work is not None
        flight.works.append(work)

    def land(self, flight: Flight) -> None:
        """Add what was received to the partition of this rank."""
        self.wait(flight)
        for piece in flight.pieces:
            if piece.owner == piece.group.rank:
                received = flight.buffer[piece.at : piece.at + piece.numel]
                self.add(piece, self.after(received, piece.group))

    def wait(self, flight: Flight) -> None:
        """Wait for the messages of a bucket."""
        for work in flight.works:
            work.wait()

    def add(self, piece: Piece, mean: Tensor) -> None:
        """Add a reduced piece to the sums of this rank."""
        group = piece.group
        first = piece.begin - group.rank * group.partition_size
        part = group.reduced[first : first + piece.numel]
        part.copy_(fp32(part) + fp32(mean))

    def land_all(self) -> None:
        """Wait for all that is on its way."""
        while self._flights:
            self.land(self._flights.pop(0))
