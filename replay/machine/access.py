"""Loads and stores: every access is checked before a byte is touched.

An access of `count` words of `size` bytes must be aligned to count·size and lie inside one
region. Regular patterns (each thread next to its neighbour, rows evenly spaced) move through a
strided view; everything else through an index.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import numpy as np

from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.errors import Misaligned, OutOfBounds, ReplayError
from twinstep.replay.machine.lanes import ActiveLanes, Lanes, MemoryOp, distinct
from twinstep.replay.machine.memory import Region
from twinstep.replay.ptx.syntax import Instruction

SHARED_WINDOW = 0x7E00 << 48
LOCAL_WINDOW = 0x7F00 << 48
SMALL, REMEMBERED = 1024, 4
"""Most threads whose accesses of shared memory are remembered across launches, and how many are."""


class Site(MemoryOp):
    """A memory instruction with the constant `offset` that is added to its address."""

    def __init__(
        self, instruction: Instruction, kind: str, space: str, size: int, count: int, offset: int
    ) -> None:
        super().__init__(instruction, kind, space, size, count)
        self.offset = np.uint64(offset % 2**64)
        self.word = np.dtype(f"u{size}")
        self._shift = np.uint64(size.bit_length() - 1)
        self._before: dict[tuple[object, ...], tuple[Array, Array]] = {}

    def load(
        self, lanes: Lanes, address: Array, guard: Array | None, old: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """The words that each active thread reads; where the guard is false, the old values."""
        if guard is not None:
            true = np.count_nonzero(guard)
            if true == guard.size:
                guard = None
            elif true == 0:
                return old
        if self.space == "global":
            words = self._load_global(lanes, address, guard, old)
        else:
            words = self._load_private(lanes, address, guard, old)
        windows = lanes.batch.windows
        if windows is not None and id(self.instruction) in lanes.batch.address_loads:
            return tuple(windows.moved(word) for word in words)
        return words

    def store(
        self, lanes: Lanes, address: Array, guard: Array | None, values: tuple[Array, ...]
    ) -> None:
        """Write each active thread's words; of two to one place the higher thread's stays."""
        if guard is not None:
            true = np.count_nonzero(guard)
            if true == guard.size:
                guard = None
            elif true == 0:
                return
        if self.space == "global":
            if self.size == 8 and lanes.batch.windows is not None:
                values = tuple(lanes.batch.windows.real(value) for value in values)
            self._store_global(lanes, address, guard, values)
        else:
            self._store_private(lanes, address, guard, values)

    # --- global memory ---------------------------------------------------------------------

    def _load_global(
        self, lanes: Lanes, address: Array, guard: Array | None, old: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        address = address + self.offset if self.offset else address
        if guard is None:
            if address.size == 1 and (found := self._uniform(lanes, int(address[0, 0]))):
                return found
            if (regular := self._regular(lanes, address)) is not None:
                region, views = regular
                self._count(lanes, region.index, lanes.size, self._merged(lanes, address))
                return tuple(view.copy() for view in views)
        chosen = self.select(lanes, address, guard)
        self.note(lanes, chosen)
        if chosen.single is not None:
            words, first = chosen.single.words(self.size, self.bytes)
            index = ((chosen.address - np.uint64(first)) >> self._shift).view(np.int64)
            every = [words[index + k if k else index] for k in range(self.count)]
            return self.spread(lanes, guard, chosen, every, old)
        out = np.empty((self.count, len(chosen.flat)), self.word)
        for region, part in chosen.regions():
            words, first = region.words(self.size, self.bytes)
            index = (chosen.address[part] - np.uint64(first)).astype(np.int64) // self.size
            for k in range(self.count):
                out[k, part] = words[index + k]
        return self.spread(lanes, guard, chosen, out, old)

    def _store_global(
        self, lanes: Lanes, address: Array, guard: Array | None, values: tuple[Array, ...]
    ) -> None:
        address = address + self.offset if self.offset else address
        if guard is None and address.shape == lanes.shape:
            regular = self._regular(lanes, address)
            if regular is not None:
                region, views = regular
                self._count(lanes, region.index, lanes.size, lanes.size * self.bytes)
                for view, value in zip(views, values, strict=True):
                    view[...] = value
                return
        chosen = self.select(lanes, stretched(address, lanes.shape), guard)
        data = tuple(stretched(v, lanes.shape).reshape(-1)[chosen.flat] for v in values)
        self.note(lanes, chosen, data)
        for region, part in chosen.regions():
            words, first = region.words(self.size, self.bytes)
            index = (chosen.address[part] - np.uint64(first)).astype(np.int64) // self.size
            for k, value in enumerate(data):
                words[index + k] = value[part]

    def _uniform(self, lanes: Lanes, address: int) -> tuple[Array, ...] | None:
        """The words at one address that all threads read; None where that needs a closer look."""
        batch = lanes.batch
        region = batch.regions.find(address, address + self.bytes)
        if region is None or address % self.bytes or batch.checks or region.elements is not None:
            return None
        words, first = region.words(self.size, self.bytes)
        index = (address - first) // self.size
        self._count(lanes, region.index, lanes.size, lanes.warp_count * self.bytes)
        return tuple(words[index : index + self.count].reshape(self.count, 1, 1).copy())

    def _regular(self, lanes: Lanes, address: Array) -> tuple[Region, list[Array]] | None:
        """Views of the words if the addresses form an even, gapless-in-the-row pattern."""
        if lanes.batch.checks is not None:
            return None
        rows, columns = address.shape
        first = int(address[0, 0])
        step = int(address[0, 1]) - first if columns > 1 else self.bytes
        stride = int(address[1, 0]) - first if rows > 1 else 0
        if step != self.bytes or stride < 0 or first % self.bytes or stride % self.bytes:
            return None
        if rows > 1 and stride < columns * step and self.kind != "read":
            return None
        region = lanes.batch.regions.find(
            first, first + (rows - 1) * stride + (columns - 1) * step + self.bytes
        )
        if region is None or region.elements is not None:
            return None
        if address.size > 1:
            pattern = _pattern(columns, step)
            if rows > 1:
                pattern = pattern + np.arange(rows, dtype=np.uint64)[:, None] * np.uint64(stride)
            if np.count_nonzero(address - np.uint64(first) != pattern):
                return None
        base = region.bytes()
        offset = first - region.start
        return region, [
            np.ndarray(
                (rows, columns), self.word, base.data, offset + k * self.size, (stride, step)
            )
            for k in range(self.count)
        ]

    def select(self, lanes: Lanes, address: Array, guard: Array | None) -> ActiveLanes:
        """The threads that access memory, their addresses, all of them checked and counted."""
        if lanes.batch.checks is not None:
            address = stretched(address, lanes.shape)  # the checks want every single thread
        if guard is None:
            flat_address = address.reshape(-1)
            flat = lanes.every if address.size == lanes.size else np.arange(address.size)
        else:
            flat = stretched(guard, lanes.shape).reshape(-1).nonzero()[0]
            flat_address = stretched(address, lanes.shape).reshape(-1)[flat]
        shape = address.shape if guard is None else lanes.shape
        chosen = ActiveLanes(lanes, flat, flat_address, shape)
        if len(flat):
            self._check(lanes, chosen)
            if lanes.batch.counted:
                self._account(lanes, chosen, guard is None)
        return chosen

    def note(
        self, lanes: Lanes, chosen: ActiveLanes, data: tuple[Array, ...] | None = None
    ) -> None:
        """Let the opt-in checks see an access of global memory before it happens."""
        if lanes.batch.checks is not None and len(chosen.flat):
            lanes.batch.checks.global_access(self, lanes, chosen, data)

    def _check(self, lanes: Lanes, chosen: ActiveLanes) -> None:
        address = chosen.address
        low, high = np.minimum.reduce(address), np.maximum.reduce(address)
        region = lanes.batch.regions.find(int(low), int(high) + self.bytes)
        if int(np.bitwise_or.reduce(address)) & (self.bytes - 1):
            wrong = (address & np.uint64(self.bytes - 1)) != 0
            self._refuse(lanes, chosen, int(np.argmax(wrong)), Misaligned)
        if region is not None:
            chosen.single = region
        else:
            chosen.index, inside = lanes.batch.regions.lookup(address, self.bytes)
            if not inside.all():
                self._refuse(lanes, chosen, int(np.argmin(inside)), OutOfBounds)
        if lanes.batch.windows is not None and lanes.batch.windows.gaps:
            self._check_gaps(lanes, chosen)

    def _check_gaps(self, lanes: Lanes, chosen: ActiveLanes) -> None:
        for region, part in chosen.regions():
            if region.elements is None:
                continue
            start = (chosen.address[part] - np.uint64(region.start)).astype(np.int64)
            own = region.elements[start[:, None] + np.arange(self.bytes)].all(axis=1)
            if not own.all():
                which = np.arange(len(chosen.flat))[part][int(np.argmin(own))]
                self._refuse(lanes, chosen, int(which), OutOfBounds)

    def _refuse(
        self, lanes: Lanes, chosen: ActiveLanes, which: int, error: type[ReplayError]
    ) -> NoReturn:
        address = int(chosen.address[which])
        regions = lanes.batch.regions
        pointers = lanes.batch.pointers(self.instruction)
        meant = [found for p in pointers if (found := regions.find(p, p)) is not None]
        region = meant[0] if len(meant) == 1 else regions.nearest(address)
        at, why = address, "is outside it"
        if region is not None:
            size, at = region.end - region.start, address + region.shift
            where = f", byte offset {address - region.start} of {region.label} ({size} bytes)"
            if region.start <= address <= region.end - self.bytes:
                why = "belongs to no element of it"
        what = f"{self.kind} of {self.bytes} bytes at address {at:#x}{where if region else ''}"
        if error is Misaligned:
            why = f"is not a multiple of {self.bytes}"
        raise error(f"{what}, {why}; {self.where(chosen.where(which), lanes)}.")

    # --- counting --------------------------------------------------------------------------

    def _count(self, lanes: Lanes, region: int, threads: int, moved: int) -> None:
        if not lanes.batch.counted:
            return
        entry = lanes.batch.traffic.setdefault((self, region), [0, 0])
        entry[0] += threads
        entry[1] += moved

    def _merged(self, lanes: Lanes, address: Array) -> int:
        """Bytes of a regular access, equal addresses within a warp counted once."""
        if address.shape[1] > 1:
            return lanes.size * self.bytes
        return lanes.warp_count * self.bytes

    def _account(self, lanes: Lanes, chosen: ActiveLanes, unguarded: bool) -> None:
        address, shape = chosen.address, chosen.shape
        if unguarded and shape != lanes.shape and shape[1] == 1:
            region = chosen.region_of(0)
            if chosen.single is not None:
                self._count(lanes, region, lanes.size, lanes.warp_count * self.bytes)
                return
        for region_object, part in chosen.regions():
            own = address[part]
            moved = len(own)
            if moved > 1 and np.count_nonzero(own[1:] > own[:-1]) < moved - 1:
                moved = distinct(own, chosen.warp()[part])
            rows = lanes.shape[0] // shape[0] if unguarded else 1
            self._count(lanes, region_object.index, len(own) * rows, moved * self.bytes * rows)

    # --- shared and local memory -----------------------------------------------------------

    def private(
        self, lanes: Lanes, address: Array, guard: Array | None
    ) -> tuple[Array, Array, Array]:
        """Memory as words, and for each accessing thread its flat position and word index.

        A loop comes by with the very arrays of its last turn, and small launches with the
        numbers of an earlier launch: what they say is looked up.
        """
        batch = lanes.batch
        memory = batch.shared if self.space == "shared" else batch.local
        known = lanes.places.get(id(self))
        if known is None or known[0] is not address or known[1] is not guard:
            known = (address, guard, *self._as_before(lanes, memory, address, guard))
            lanes.places[id(self)] = known
        flat, place = known[2:]
        if batch.counted:
            batch.counts[f"{self.space} {self.kind}"] += len(flat) * self.bytes
        return memory.reshape(-1).view(self.word), flat, place

    def _as_before(
        self, lanes: Lanes, memory: Array, address: Array, guard: Array | None
    ) -> tuple[Array, Array]:
        """As `_private`, from one of the last accesses if that was the same."""
        if not lanes.full or lanes.size > SMALL:
            return self._private(lanes, memory, address, guard)
        taking = None if guard is None else (guard.shape, guard.tobytes())
        key = (lanes.shape, memory.shape[1], address.shape, address.tobytes(), taking)
        found = self._before.get(key)
        if found is None:
            found = self._private(lanes, memory, address, guard)
            if len(self._before) >= REMEMBERED:
                self._before.clear()
            self._before[key] = found
        return found

    def _private(
        self, lanes: Lanes, memory: Array, address: Array, guard: Array | None
    ) -> tuple[Array, Array]:
        """Flat positions and word indices of the accesses, each of them checked."""
        # The sum wraps around in the register's width; what lies before 0 becomes negative.
        whole = address + self.offset.astype(address.dtype) if self.offset else address
        own = whole.view(f"i{whole.dtype.itemsize}").astype(np.int64)
        every = own.reshape(-1)
        low, high = int(np.minimum.reduce(every)), int(np.maximum.reduce(every))
        bits = int(np.bitwise_or.reduce(every))
        if low < 0 or high + self.bytes > memory.shape[1] or bits % self.bytes:
            self._refuse_private(lanes, own, guard)
        place = own + self._rows(lanes) * memory.shape[1]
        place = stretched(place >> self._shift.view(np.int64), lanes.shape).reshape(-1)
        flat = lanes.every
        if guard is not None:
            flat = stretched(guard, lanes.shape).reshape(-1).nonzero()[0]
            place = place[flat]
        return flat, place

    def _rows(self, lanes: Lanes) -> Array:
        """The row of memory that each thread owns."""
        if self.space == "local":
            return np.asarray(lanes.row_index * lanes.batch.threads + lanes.thread_index)
        return lanes.row_index

    def _refuse_private(self, lanes: Lanes, own: Array, guard: Array | None) -> None:
        """Name the first access that does not fit, if one that takes place does not."""
        memory = lanes.batch.shared if self.space == "shared" else lanes.batch.local
        takes = stretched(np.ones((1, 1), np.bool_) if guard is None else guard, lanes.shape)
        own, flat = stretched(own, lanes.shape)[takes], np.flatnonzero(takes)
        wrong = own % self.bytes != 0
        outside = (own < 0) | (own + self.bytes > memory.shape[1])
        for mask, error in ((outside, OutOfBounds), (wrong, Misaligned)):
            if mask.any():
                which = int(np.argmax(mask))
                raise error(
                    f"{self.space} {self.kind} of {self.bytes} bytes at offset {own[which]} of "
                    f"{memory.shape[1]}; {self.where(int(flat[which]), lanes)}."
                )

    def note_private(
        self, lanes: Lanes, flat: Array, index: Array, data: tuple[Array, ...] | None = None
    ) -> None:
        """Let the opt-in checks see an access of shared memory before it happens."""
        if lanes.batch.checks is not None and self.space == "shared":
            lanes.batch.checks.shared_access(self, lanes, flat, index * self.size, data)

    def _load_private(
        self, lanes: Lanes, address: Array, guard: Array | None, old: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        words, flat, index = self.private(lanes, address, guard)
        self.note_private(lanes, flat, index)
        out = [words[index + k if k else index] for k in range(self.count)]
        return self.spread(lanes, guard, ActiveLanes(lanes, flat, index, lanes.shape), out, old)

    def _store_private(
        self, lanes: Lanes, address: Array, guard: Array | None, values: tuple[Array, ...]
    ) -> None:
        words, flat, index = self.private(lanes, address, guard)
        data = tuple(stretched(v, lanes.shape).reshape(-1) for v in values)
        if guard is not None:
            data = tuple(value[flat] for value in data)
        self.note_private(lanes, flat, index, data)
        for k, value in enumerate(data):
            words[index + k if k else index] = value

    def spread(
        self,
        lanes: Lanes,
        guard: Array | None,
        chosen: ActiveLanes,
        out: Array | list[Array],
        old: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """Loaded words back in the shape of the lanes, old values where the guard is false.

        Without old values the words are not wanted: `red` has no result.
        """
        if guard is None:
            return tuple(out[k].reshape(chosen.shape) for k in range(self.count))
        results = []
        for k in range(self.count if old else 0):
            whole = np.array(stretched(old[k], lanes.shape))
            whole.reshape(-1)[chosen.flat] = out[k]
            results.append(whole)
        return tuple(results)


@functools.lru_cache(maxsize=256)
def _pattern(columns: int, step: int) -> Array:
    """Distances of a row's addresses from its first, shape (1, columns); never written to."""
    return np.arange(columns, dtype=np.uint64)[None, :] * np.uint64(step)
