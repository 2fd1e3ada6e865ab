"""Barriers that threads of a batch have passed, and whom they met there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from twinstep.replay.checks.clocks import Release
from twinstep.replay.checks.history import NOBODY
from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.machine.lanes import Lanes


class Epochs:
    """Epochs of blocks and of their warps, each of which ends at a barrier.

    Args:
        blocks: Of the batch, one for each row.
        threads: Of a block.
    """

    def __init__(self, blocks: Array, threads: int) -> None:
        self.blocks, self.threads = blocks, threads
        rows, warps = len(blocks), -(-threads // 32)
        self.block = np.zeros(rows, np.int64)
        self.warp = np.zeros((rows, warps), np.int64)
        self.met = np.full((rows, warps, warps), NOBODY, np.int64)
        """Up to which epoch of a warp (last index) another met it at a barrier of some warps."""

    def barrier(self, lanes: Lanes, warp_only: bool, some: bool) -> None:
        """These threads have met: within their warps, or `some` or all warps of their blocks."""
        rows = stretched(lanes.row_index, lanes.shape).reshape(-1)
        threads = stretched(lanes.thread_index, lanes.shape).reshape(-1)
        met = np.zeros(self.warp.shape, np.bool_)
        met[rows, threads // 32] = True
        if some:
            for row in np.unique(rows):
                group = np.flatnonzero(met[row])
                known = self.met[row, group].max(axis=0)
                known[group] = self.warp[row, group]
                self.met[row, group] = known
        elif not warp_only:
            self.block[np.unique(rows)] += 1
        self.warp[met] += 1

    def met_since(self, earlier: Array, thread: int) -> bool:
        """True if a thread has met the warp of an earlier event of its block since then."""
        block, own = divmod(thread, self.threads)
        other = int(earlier[0]) % self.threads // 32
        return bool(earlier[2] <= self.met[self.row(block), own // 32, other])

    def row(self, block: int) -> int:
        """The row of a block."""
        return int(np.flatnonzero(self.blocks == block)[0])

    def after(self, row: int, thread: int, epoch: int) -> Callable[[int, int], bool]:
        """Tells of a thread and an epoch of its warp whether this one, now, comes after them."""
        warp, met = thread // 32, self.met[row, thread // 32]

        def comes_after(other: int, then: int) -> bool:
            same_warp = other // 32 == warp and then < epoch
            return other == thread or same_warp or bool(then <= met[other // 32])

        return comes_after

    def joining(
        self, lanes: Lanes, flat: Array
    ) -> Iterator[tuple[int, Array, list[tuple[Release, int]]]]:
        """Block by block: its row, which threads are its, and these as `Clocks` takes them."""
        rows = stretched(lanes.row_index, lanes.shape).reshape(-1)[flat]
        threads = stretched(lanes.thread_index, lanes.shape).reshape(-1)[flat]
        for row in np.unique(rows).tolist():
            here = rows == row
            known: dict[int, Array] = {}
            joining: list[tuple[Release, int]] = []
            for thread in threads[here].tolist():
                own, epoch = thread // 32, int(self.warp[row, thread // 32])
                if own not in known:
                    # Epochs up to `met` count as met; a barrier of its own warp has begun another.
                    known[own] = self.met[row, own] + 1
                    known[own][own] = epoch
                joining.append(((thread, int(self.block[row]), known[own]), epoch))
            yield row, here, joining
