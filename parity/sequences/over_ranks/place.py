"""One rank of a drawn world as rules see it: its place, its groups, its pieces of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from twinstep.parity.ranks.world import Rank

T = TypeVar("T")
AXES = ("data", "expert", "tensor")
REPLICAS = ("data", "expert")
# The simplest first. Three axes at once need eight ranks.
WORLDS = (
    *("data 1", "data 2", "tensor 2", "expert 2", "data 3"),
    *("data 2, tensor 2", "data 2, expert 2", "expert 2, tensor 2", "tensor 3", "data 4"),
    *("data 3, tensor 2", "data 7", "data 2, expert 2, tensor 2", "data 8"),
)
EXPERT, OWN_EXPERT = "e", "f"


def axes_of(text: str) -> dict[str, int]:
    """Number of ranks along each axis, of a text such as "data 2, tensor 2"."""
    given = dict(part.split() for part in text.split(", "))
    return {axis: int(given.get(axis, 1)) for axis in AXES}


def places_of(text: str) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Places of all ranks of a world, by number, and the number of ranks along each axis."""
    sizes = axes_of(text)
    places = [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]
    return places, sizes


def split_over(param: Tensor) -> tuple[str, ...]:
    """Axes along which ranks hold different pieces of a parameter, by its marks."""
    name = "" if getattr(param, "allreduce", True) else getattr(param, "group_name", "")
    experts = {EXPERT: ("expert",), OWN_EXPERT: REPLICAS}.get(name, ())
    marks = ("model_parallel", "tensor_model_parallel")
    return (*experts, *(("tensor",) if any(getattr(param, mark, False) for mark in marks) else ()))


class DrawnRank:
    """One rank of a run.

    Attributes:
        number: in the world.
        sizes: number of ranks along each axis.
        at: this rank's place along each axis.
        rank: the simulated rank.
        shares: gradients are this rank's alone until it reduces them.
        alone: an overflow may be on one rank alone, since all others hear of it.
        apart: number of the part of the world, once it has been cut along the data axis.
    """

    def __init__(self, rank: Rank, ranks: str, board: dict[int, object]) -> None:
        self.rank, self.number, self.at = rank, rank.number, rank.place
        self.places, self.sizes = places_of(ranks)
        self.shares, self.alone, self.apart = False, False, 0
        self._parts: dict[str, dist.ProcessGroup] = {}
        self._board, self._all = board, rank.new_group(range(len(self.places)), name=MEETING)

    def __str__(self) -> str:
        return place_text(self.number, self.at, self.sizes)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along these axes alone."""
        return self.rank.group(*axes)

    def cut(self, size: int, *axes: str) -> dist.ProcessGroup:
        """The part of such a group that remains where so many data-parallel ranks are together."""
        name = f"{' and '.join(axes)} by {size}"
        if name not in self._parts:
            ranks = [
                number
                for number, at in enumerate(self.places)
                if at["data"] // size == self.at["data"] // size
                and all(axis in axes or at[axis] == self.at[axis] for axis in AXES)
            ]
            part = self.rank.new_group(ranks, name=name)
            assert part is not None
            self._parts[name] = part
        return self._parts[name]

    def meet(self) -> None:
        """Wait for all ranks."""
        assert self._all is not None
        self._all.barrier().wait()

    def exchange(self, value: T) -> list[T]:
        """Values of all ranks, by number; behind the back of the class."""
        self._board[self.number] = value
        self.meet()
        found: list[T] = [self._board[number] for number in range(len(self.places))]  # type: ignore[misc]
        self.meet()
        return found

    def piece(self, param: Tensor) -> int:
        """Number of this rank's piece of a parameter."""
        return self._numbered(self.at, split_over(param))

    def seed_of(self, param: Tensor, seed: int, gradient: bool) -> int:
        """Seed of values of the piece of a parameter that this rank holds."""
        share = self._numbered(self.at, self._shared(param)) if gradient else 0
        return seed + 100_003 * self.piece(param) + 1_009 * share

    def is_hit(self, param: Tensor, seed: int) -> bool:
        """True if an overflow hits this rank's piece: all for one seed of four.

        Otherwise it hits those of one rank, and of the ranks that hold the same, unless it is on
        that rank alone.
        """
        turn, size = seed // 4, len(self.places)
        if seed % 4 == 0:
            return True
        target = self.places[turn % size]
        if self.alone and turn // size % 2:
            return target == self.at
        over = (*split_over(param), *self._shared(param))
        return self._numbered(target, over) == self._numbered(self.at, over)

    def holds_as(self, param: Tensor, on: int) -> bool:
        """True if this rank holds the piece that the rank of a number holds, counted round."""
        over = split_over(param)
        target = self.places[on % len(self.places)]
        return self._numbered(target, over) == self._numbered(self.at, over)

    def _shared(self, param: Tensor) -> tuple[str, ...]:
        """Axes over which gradients of a parameter are yet to be added up."""
        over = split_over(param)
        return tuple(axis for axis in REPLICAS if axis not in over) if self.shares else ()

    def _numbered(self, at: Mapping[str, int], axes: Sequence[str]) -> int:
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + at[axis]
        return number


# Name of the group in which ranks meet at the end of an action.
MEETING = "of the judge"


def place_text(number: int, at: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """A rank with its place: "rank 1 (data 0, tensor 1)"; axes of one rank are left out."""
    named = [f"{axis} {at[axis]}" for axis in sizes if sizes[axis] > 1]
    return f"rank {number} ({', '.join(named)})" if named else f"rank {number}"
