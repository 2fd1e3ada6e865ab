"""The threads that take part in one access of memory, and how many different places they name."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.lanes import Lanes
from twinstep.replay.memory import Region


class Chosen:
    """The threads that take part in one access, as positions in the lanes' shape."""

    def __init__(self, lanes: Lanes, flat: Array, address: Array, shape: tuple[int, ...]) -> None:
        self.lanes = lanes
        self.flat = flat
        self.address = address
        self.shape = shape
        self.single: Region | None = None
        self.index: Array | None = None

    def regions(self) -> list[tuple[Region, Array | slice]]:
        """Each region touched, with the accesses that go there."""
        if not len(self.flat):
            return []
        if self.single is not None:
            return [(self.single, slice(None))]
        assert self.index is not None
        known = self.lanes.batch.regions.regions
        return [(known[i], np.flatnonzero(self.index == i)) for i in np.unique(self.index)]

    def region_of(self, which: int) -> int:
        """Index of the region of one access."""
        if self.single is not None:
            return self.single.index
        assert self.index is not None
        return int(self.index[which])

    def where(self, which: int) -> int:
        """The position in the lanes' shape of one access."""
        row, column = divmod(int(self.flat[which]), self.shape[1])
        return row * self.lanes.shape[1] + column

    def warp(self) -> Array:
        """A number per access that equal warps share."""
        lanes = self.lanes
        if self.shape == lanes.shape:
            every = lanes.row_index * 32 + lanes.thread_index // 32
            whole = stretched(every, lanes.shape).reshape(-1)
            return whole if len(self.flat) == len(whole) else whole[self.flat]
        row, column = np.divmod(self.flat, self.shape[1])
        rows = stretched(lanes.row_index, lanes.shape)[row, column]
        threads = stretched(lanes.thread_index, lanes.shape)[row, column]
        return np.asarray(rows * 32 + threads // 32)


def distinct(address: Array, warp: Array) -> int:
    """How many different pairs of warp and address there are; equal warps stand together."""
    other = warp[1:] != warp[:-1]
    if (other | (address[1:] >= address[:-1])).all():
        return 1 + int(np.count_nonzero(other | (address[1:] != address[:-1])))
    key = np.sort(warp.astype(np.uint64) << np.uint64(48) ^ address)
    return 1 + int(np.count_nonzero(key[1:] != key[:-1]))
