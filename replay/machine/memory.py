"""The global memory that a launch may touch: the bytes of known tensors and nothing else.

A tensor contributes the span from its first to its last element, not its whole storage, so that
an access past a view is an error even where the storage goes on. Overlapping spans are one
region. Addresses are real; a region's bytes are reached through a NumPy view of its memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from twinstep.replay.dtypes import Array


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


@dataclass
class Region:
    """A run of bytes that belongs to one tensor (or to several that overlap).

    Attributes:
        shift: Distance from an address to the real one, for windows (see `windows`).
        home: Of a window, the region that has the same bytes at their real addresses.
        elements: Of a window, flags of the bytes that belong to elements; None if all do.
    """

    start: int
    end: int
    label: str
    keeper: object = None
    index: int = 0
    shift: int = 0
    home: Region | None = None
    elements: Array | None = None
    _views: dict[tuple[int, int], tuple[Array, int]] = field(default_factory=dict)
    _bytes: Array | None = None

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


class Regions:
    """The regions of one launch, ordered by address.

    Args:
        tensors: (label, tensor) pairs; empty tensors count for nothing.
        extra: (label, address, bytes, keeper) of memory that is no tensor.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        extra: Iterable[tuple[str, int, int, object]] = (),
    ) -> None:
        spans: list[tuple[int, int, str, object]] = [
            (start := t.data_ptr(), start + span(t), label, t) for label, t in tensors
        ]
        spans += [(address, address + size, label, keep) for label, address, size, keep in extra]
        self.regions: list[Region] = []
        for start, end, label, keeper in sorted(spans, key=lambda item: (item[0], -item[1])):
            if start == end:
                continue
            last = self.regions[-1] if self.regions else None
            if last is not None and start < last.end:
                last.end = max(last.end, end)
                if label not in last.label.split("/"):
                    last.label += f"/{label}"
                last.keeper = (last.keeper, keeper)
            else:
                self.regions.append(Region(start, end, label, keeper, len(self.regions)))
        self._index()

    def _index(self) -> None:
        self.starts = [region.start for region in self.regions]
        self.start_array = np.array(self.starts, np.uint64)
        self.end_array = np.array([region.end for region in self.regions], np.uint64)

    def find(self, low: int, high: int) -> Region | None:
        """The region that holds all of [low, high), if one does."""
        index = bisect_right(self.starts, low) - 1
        if index < 0 or high > self.regions[index].end:
            return None
        return self.regions[index]

    def nearest(self, address: int) -> Region | None:
        """The region whose edge is closest to an address outside all of them."""

        def distance(region: Region) -> int:
            return max(region.start - address, address - region.end + 1, 0)

        return min(self.regions, key=distance, default=None)

    def lookup(self, addresses: Array, size: int) -> tuple[Array, Array]:
        """For each address the index of its region and whether `size` bytes fit there."""
        index = np.searchsorted(self.start_array, addresses, side="right") - 1
        if not self.regions:
            return index, np.zeros(addresses.shape, np.bool_)
        inside = index >= 0
        safe = np.maximum(index, 0)
        inside &= addresses + np.uint64(size) <= self.end_array[safe]
        # An address near 2**64 wraps when the size is added.
        inside &= addresses <= addresses + np.uint64(size)
        return safe, inside
