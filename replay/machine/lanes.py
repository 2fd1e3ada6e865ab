"""Threads executed together: a batch of blocks, and the active part of it.

Values of registers have shape (blocks, threads), or 1 in either place where all agree: a kernel
parameter is (1, 1), a block index (blocks, 1), a thread index (1, threads). While threads are on
different paths, the active ones are taken out into a smaller shape, run, and put back.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.machine.memory import Region, Regions
from twinstep.replay.machine.named import NamedBytes
from twinstep.replay.machine.windows import Windows
from twinstep.replay.ptx.syntax import Instruction

Place = tuple[int, int, int]


class MemoryOp:
    """One memory instruction of one kernel.

    Attributes:
        kind: "read", "write" or "atomic".
        space: "global", "shared" or "local".
        size: Bytes of one word.
        count: Words per thread.
    """

    def __init__(
        self, instruction: Instruction, kind: str, space: str, size: int, count: int
    ) -> None:
        self.instruction = instruction
        self.kind = kind
        self.space = space
        self.size = size
        self.count = count
        self.bytes = size * count

    def where(self, flat: int, lanes: Lanes) -> str:
        """The instruction, its source line and the thread, for messages."""
        block, thread = lanes.place(flat)
        return (
            f"kernel {lanes.batch.kernel}, {self.instruction.place}, "
            f"`{self.instruction.text}`, block {block}, thread {thread}"
        )


class Checks(Protocol):
    """The opt-in checks of one batch, as accesses and barriers call them."""

    def barrier(self, lanes: Lanes, warp_only: bool, some: bool) -> None:
        """These threads have met."""

    def fence(
        self, lanes: Lanes, guard: Array | None, scope: str, acquires: bool, releases: bool
    ) -> None:
        """These threads pass a fence."""

    def global_access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        chosen: ActiveLanes,
        data: tuple[Array, ...] | None,
    ) -> None:
        """An access of global memory, before it happens."""

    def shared_access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        flat: Array,
        start: Array,
        data: tuple[Array, ...] | None,
    ) -> None:
        """An access of shared memory, before it happens."""

    def summed(
        self,
        kind: str,
        words: Array,
        index: Array,
        turns: tuple[Array, Array, Array],
        part: Array | slice,
    ) -> None:
        """Floats that an atomic access, the last one, has just added; see `Sums.shake`."""


@dataclass
class Batch:
    """Blocks that run together, their shared and local memory, and what they count.

    Attributes:
        blocks: Linear block index of each row.
        threads: Threads per block.
        grid: Number of blocks in x, y, z.
        block: Number of threads in x, y, z.
        params: The parameter bytes.
        shared: Shared memory, uint8, one row per block.
        local: Local memory, uint8, one row per thread; empty where the kernel has none.
        traffic: Per site and region index: lanes, bytes moved.
        pointers: For messages: the parameter values that an address was computed from.
        windows: The regions, where each tensor is at addresses of its own.
        address_loads: There, the `id` of each load that an address may be computed from.
        checks: Checks of races and of unwritten memory, where asked for.
        counted: Whether accesses are counted; they are where the launch is recorded.
        named: The parameters that have names, by the byte where each starts.
    """

    blocks: Array
    threads: int
    grid: Place
    block: Place
    params: bytes
    regions: Regions
    shared: Array
    local: Array
    kernel: str
    traffic: dict[tuple[MemoryOp, int], list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    checks: Checks | None = None
    pointers: Callable[[Instruction], list[int]] = lambda _: []
    windows: Windows | None = None
    address_loads: frozenset[int] = frozenset()
    counted: bool = True
    named: Mapping[int, NamedBytes] = field(default_factory=dict)

    def block_place(self, row: int) -> Place:
        """Block coordinates of a row."""
        return unravel(int(self.blocks[row]), self.grid)

    def block_place_of(self, block: int) -> Place:
        """Block coordinates of a linear index."""
        return unravel(block, self.grid)

    def thread_place(self, thread: int) -> Place:
        """Thread coordinates within its block."""
        return unravel(thread, self.block)


def unravel(index: int, extent: Place) -> Place:
    """A linear index as x, y, z with x fastest."""
    return index % extent[0], index // extent[0] % extent[1], index // (extent[0] * extent[1])


class Lanes:
    """The active threads of a batch.

    Args:
        batch: The batch.
        rows: Rows that are active with all their threads, or None for all.
        ids: Flat indices of single active threads, or None.
    """

    def __init__(self, batch: Batch, rows: Array | None = None, ids: Array | None = None) -> None:
        self.batch = batch
        self.rows = rows
        self.ids = ids
        threads = batch.threads
        if ids is not None:
            self.shape = (1, len(ids))
            self.row_index = (ids // threads)[None, :]
            self.thread_index = (ids % threads)[None, :]
        else:
            chosen = np.arange(len(batch.blocks)) if rows is None else rows
            self.shape = (len(chosen), threads)
            self.row_index = chosen[:, None]
            self.thread_index = np.arange(threads)[None, :]
        self.size = self.shape[0] * self.shape[1]
        self.full = rows is None and ids is None
        # Per memory instruction its last address and guard, and where they lead.
        self.places: dict[int, tuple[Array, Array | None, Array, Array]] = {}

    @functools.cached_property
    def every(self) -> Array:
        """The positions of all threads in this shape; never written to."""
        return np.arange(self.size)

    @functools.cached_property
    def warp_count(self) -> int:
        """Number of warps of all rows of this shape."""
        return self.shape[0] * -(-self.shape[1] // 32)

    def barrier(self, warp_only: bool = False, count: int = 0) -> None:
        """Tell the checks of memory that these threads have met: `count` of a block, or all (0)."""
        if self.batch.checks is not None:
            self.batch.checks.barrier(self, warp_only, 0 < count < self.batch.threads)

    def fence(self, guard: Array | None, scope: str, acquires: bool, releases: bool) -> None:
        """Tell the checks of memory that these threads pass a fence."""
        if self.batch.checks is not None:
            self.batch.checks.fence(self, guard, scope, acquires, releases)

    def gather(self, value: Array) -> Array:
        """The active part of a value of the whole batch."""
        rows, columns = value.shape
        if rows == columns == 1 or self.full:
            return value
        if self.rows is not None:
            return value if rows == 1 else value[self.rows]
        row = self.row_index[0] if rows > 1 else 0
        column = self.thread_index[0] if columns > 1 else 0
        return np.asarray(value[row, column][None, :])

    def scatter(self, old: Array | None, value: Array, undefined: Array) -> Array:
        """The whole batch's value with the active part replaced; `old` is left as it was."""
        if self.full:
            return value
        whole = (len(self.batch.blocks), self.batch.threads)
        base = undefined if old is None else old
        result = np.array(stretched(base, whole))
        if self.rows is not None:
            result[self.rows] = value
        else:
            result[self.row_index[0], self.thread_index[0]] = stretched(value, self.shape)[0]
        return result

    def warps(self, value: Array) -> Array:
        """A value as (rows, warps, 32); positions without an active thread hold zero."""
        threads = self.batch.threads
        padded = -(-threads // 32) * 32
        if self.ids is None:
            whole = stretched(value, self.shape)
            if padded != threads:
                whole = np.pad(whole, ((0, 0), (0, padded - threads)))
            return whole.reshape(self.shape[0], padded // 32, 32)
        whole = np.zeros((len(self.batch.blocks), padded), value.dtype)
        whole[self.row_index[0], self.thread_index[0]] = stretched(value, self.shape)[0]
        return whole.reshape(len(self.batch.blocks), padded // 32, 32)

    def active(self) -> Array:
        """Flags of the positions of the `warps` layout that hold an active thread."""
        return self.warps(np.ones((1, 1), np.bool_))

    def unwarp(self, value: Array) -> Array:
        """The inverse of `warps`."""
        whole = value.reshape(value.shape[0], -1)
        if self.ids is None:
            return whole[:, : self.batch.threads]
        return np.asarray(whole[self.row_index[0], self.thread_index[0]][None, :])

    def place(self, flat: int) -> tuple[Place, Place]:
        """Block and thread coordinates of an active thread, counted in this shape."""
        row, column = divmod(flat, self.shape[1])
        threads = stretched(self.thread_index, self.shape)
        rows = stretched(self.row_index, self.shape)
        batch = self.batch
        return (
            batch.block_place(int(rows[row, column])),
            batch.thread_place(int(threads[row, column])),
        )


class ActiveLanes:
    """The threads that take part in one access, as positions in the lanes' shape."""

    def __init__(self, lanes: Lanes, flat: Array, address: Array, shape: tuple[int, ...]) -> None:
        self.lanes = lanes
        self.flat = flat
        self.address = address
        self.shape = shape
        self.single: Region | None = None
        self.index: Array | None = None
        self._parts: list[tuple[Region, Array | slice]] | None = None

    def regions(self) -> list[tuple[Region, Array | slice]]:
        """Each region touched, with the accesses that go there."""
        if not len(self.flat):
            return []
        if self.single is not None:
            return [(self.single, slice(None))]
        if self._parts is None:
            assert self.index is not None
            known, index = self.lanes.batch.regions, self.index
            places = sorted(set(index.tolist()))
            self._parts = [(known.region(i), (index == i).nonzero()[0]) for i in places]
        return self._parts

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
    """Number of different pairs of warp and address; equal warps stand together."""
    other = warp[1:] != warp[:-1]
    if (other | (address[1:] >= address[:-1])).all():
        return 1 + int(np.count_nonzero(other | (address[1:] != address[:-1])))
    key = np.sort(warp.astype(np.uint64) << np.uint64(48) ^ address)
    return 1 + int(np.count_nonzero(key[1:] != key[:-1]))
