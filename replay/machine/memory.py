"""The global memory that a launch may touch: the bytes of known tensors and nothing else.

A tensor contributes the span from its first to its last element, not its whole storage, so that
an access past a view is an error even where the storage goes on. Overlapping spans are one
region. Addresses are real; a region's bytes are reached through a NumPy view of its memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from twinstep.replay.dtypes import Array

Pairs = Sequence[tuple[str, torch.Tensor]]


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 when it is empty."""
    count = tensor.numel()
    if count == 0 or tensor.is_contiguous():
        return count * tensor.element_size()
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


class _Bytes:
    """Memory at an address, as NumPy asks for it."""

    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class Member(NamedTuple):
    """Something that lies in a region.

    Attributes:
        place: Among the known.
        label: Its name.
        keeper: The tensor, or what else keeps the memory alive.
    """

    place: int
    label: str
    keeper: object


@dataclass
class Region:
    """A run of bytes that belongs to one tensor (or to several that overlap).

    Attributes:
        members: Everything that lies in it.
        shift: Distance from an address to the real one, for windows (see `windows`).
        home: Of a window, the region that has the same bytes at their real addresses.
        elements: Of a window, flags of the bytes that belong to elements; None if all do.
    """

    start: int
    end: int
    members: list[Member]
    index: int = 0
    shift: int = 0
    home: Region | None = None
    elements: Array | None = None
    _views: dict[tuple[int, int], tuple[Array, int]] = field(default_factory=dict)
    _bytes: Array | None = None

    @property
    def label(self) -> str:
        """The names of its members, each once."""
        return "/".join(dict.fromkeys(member.label for member in self.members))

    def bytes(self) -> Array:
        """All of the region's bytes, as uint8."""
        if self._bytes is None:
            self._bytes = np.asarray(_Bytes(self.start + self.shift, self.end - self.start))
        return self._bytes

    def words(self, size: int, align: int) -> tuple[Array, int]:
        """The region as words of `size` bytes from its first address divisible by `align`.

        Returns:
            The words (1-D, unsigned) and the address of the first.
        """
        found = self._views.get((size, align))
        if found is None:
            first = -(-self.start // align) * align
            count = max(self.end - first, 0) // size
            offset = first - self.start
            words = self.bytes()[offset : offset + count * size].view(f"u{size}")
            found = self._views[size, align] = words, first
        return found


class Extents:
    """Places of tensors in the CPU's memory, measured again only once one has moved.

    Hundreds may be known to thousands of launches.

    Args:
        tensors: (label, tensor) pairs; tensors of other devices count for nothing.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self.pairs = tuple(tensors)
        self._last: tuple[object, Pairs, Array] | None = None

    def measured(self) -> tuple[Pairs, Array]:
        """The pairs, and of each the addresses of its first byte and past its last."""
        tensors = [tensor for _, tensor in self.pairs]
        dense = list(map(torch.Tensor.is_contiguous, tensors))
        seen = list(map(torch.Tensor.data_ptr, tensors)), [t.nbytes for t in tensors], dense
        last = self._last
        if last is None or last[0] != seen or not all(dense):
            here = [pair for pair in self.pairs if pair[1].device.type == "cpu"]
            ends = [(start := t.data_ptr(), start + span(t)) for _, t in here]
            # Threads may share it: what belongs together is put down at once.
            last = self._last = seen, here, np.array(ends, np.uint64).reshape(-1, 2)
        return last[1:]


class Regions:
    """The regions of one launch, ordered by address.

    Args:
        tensors: What it knows; empty tensors count for nothing.
        extra: (label, address, bytes, keeper) of memory that is no tensor.
    """

    def __init__(
        self,
        tensors: Sequence[Extents],
        extra: Sequence[tuple[str, int, int, object]] = (),
    ) -> None:
        measured = [each.measured() for each in tensors]
        known: list[tuple[str, object]] = [pair for pairs, _ in measured for pair in pairs]
        known += [(label, keep) for label, _, _, keep in extra]
        others = [(address, address + size) for _, address, size, _ in extra]
        rows = [*(row for _, row in measured), np.array(others, np.uint64).reshape(-1, 2)]
        starts, ends = np.concatenate(rows).T
        order = np.lexsort((~ends, starts))
        order = order[starts[order] < ends[order]]
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        first, last = np.ones((2, len(order)), np.bool_)
        first[1:] = last[:-1] = starts[1:] >= ends[:-1]
        self.start_array, self.end_array = starts[first], ends[last]
        self.starts: list[int] = self.start_array.tolist()
        self.ends: list[int] = self.end_array.tolist()
        self._known, self._order = known, order.tolist()
        self._first = [*np.flatnonzero(first).tolist(), len(order)]
        self._regions: dict[int, Region] = {}

    def region(self, index: int) -> Region:
        """A region, made when it is first asked for: a launch knows hundreds and touches a few."""
        if index not in self._regions:
            places = self._order[self._first[index] : self._first[index + 1]]
            members = [Member(place, *self._known[place]) for place in places]
            self._regions[index] = Region(self.starts[index], self.ends[index], members, index)
        return self._regions[index]

    def _add(self, start: int, end: int, members: list[Member]) -> Region:
        """A further region, behind all others."""
        region = Region(start, end, members, len(self.starts))
        self._regions[region.index] = region
        self.starts.append(start)
        self.ends.append(end)
        return region

    def find(self, low: int, high: int) -> Region | None:
        """The region that holds all of [low, high), if one does."""
        index = bisect_right(self.starts, low) - 1
        if index < 0 or high > self.ends[index]:
            return None
        return self._regions.get(index) or self.region(index)

    def nearest(self, address: int) -> Region | None:
        """The region whose edge is closest to an address outside all of them."""

        def distance(index: int) -> int:
            return max(self.starts[index] - address, address - self.ends[index] + 1, 0)

        index = min(range(len(self.starts)), key=distance, default=None)
        return None if index is None else self.region(index)

    def lookup(self, addresses: Array, size: int) -> tuple[Array, Array]:
        """For each address the index of its region and whether `size` bytes fit there."""
        if len(self.start_array) < len(self.starts):
            self.start_array = np.array(self.starts, np.uint64)
            self.end_array = np.array(self.ends, np.uint64)
        index = np.searchsorted(self.start_array, addresses, side="right") - 1
        if not self.starts:
            return index, np.zeros(addresses.shape, np.bool_)
        inside = index >= 0
        safe = np.maximum(index, 0)
        inside &= addresses + np.uint64(size) <= self.end_array[safe]
        # An address near 2**64 wraps when the size is added.
        inside &= addresses <= addresses + np.uint64(size)
        return safe, inside
