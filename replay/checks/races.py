"""Opt-in checks: accesses without an order between them, and reads of memory never written.

Every word remembers its last write, its last two readers, and the last ones of two more blocks.
A word is as long as the shortest access that the kernel makes, so that none divides it. Two
threads' accesses are ordered

* within a block, by a barrier between them: of all threads, of the warps that one with a count
  joins (at one place of the code), or of a warp (`bar.warp.sync`);
* between blocks, by a thread that releases and one that acquires at the same address (atomics,
  loads and stores; relaxed ones, too, behind a fence and before one), as far as each of them has
  met the others of its block (see `clocks`).

Unordered accesses of one word, at least one of them a plain write that changes its value, are a
race. Atomics, and loads and stores that are volatile or relaxed, do not race with one another, but
for those of scope `.cta` between blocks, and for a load whose thread stores what it happened to
read: between blocks of what any strong access writes, within a block of what a volatile store does.
Volatile is no barrier, threads of a warp need not run in step, and a total that other blocks still
add to is no total. That is not so where a loop reads again until another thread has stored, where
the kernel exchanges, and where the value decides alone whether to store (see `flow`). A read
whose value enters a shuffle of the whole warp comes before what the warp stores behind it. Two
things that compilers do with replicated threads are not reported within a block: a store of the
value that is already there, and a read of global memory that another thread writes, by a thread
that stores nothing that derives from it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from twinstep.replay.checks.clocks import Effect, strong
from twinstep.replay.checks.epochs import Epochs
from twinstep.replay.checks.history import NOBODY, Access, History, Trace
from twinstep.replay.checks.uninitialised import Unwritten
from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.errors import Race
from twinstep.replay.machine.lanes import ActiveLanes, Batch, Lanes, MemoryOp
from twinstep.replay.ptx.syntax import Instruction


class BatchChecks:
    """The checks of one batch: its epochs and its shared memory."""

    def __init__(self, memory: History, batch: Batch) -> None:
        self.memory = memory
        self.batch = batch
        self.epochs = Epochs(batch.blocks, batch.threads)
        words = batch.shared.size // memory.word if memory.races else 0
        self.shared_trace = Trace(words, batch.threads)
        self.shared_written = np.zeros(batch.shared.size, np.bool_)
        self.loose = np.zeros(0, np.bool_)
        """Which threads of the last atomic access have no order with those before at their word."""
        self.stored: dict[int, dict[int, int]] = {}
        """The last access of each thread by each instruction that stores."""
        self.idle: dict[int, list[tuple[str, Instruction]]] = {}
        """Races that a thread takes part in as soon as it stores what derives from a load."""

    def barrier(self, lanes: Lanes, warp_only: bool, some: bool) -> None:
        """These threads have met: within their warps, or `some` or all warps of their blocks."""
        self.epochs.barrier(lanes, warp_only, some)

    def global_access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        chosen: ActiveLanes,
        data: tuple[Array, ...] | None,
    ) -> None:
        """Check and note an access of global memory, before it happens."""
        flat = chosen.flat
        addresses = chosen.address.astype(np.int64)
        for region, part in chosen.regions() if self.batch.windows is not None else ():
            addresses[part] += region.shift
        if self.memory.unwritten is not None:
            self._initialised(site, lanes, flat, addresses, self.memory.unwritten)
        if not self.memory.races:
            return
        # An access that releases is itself known to whoever acquires that.
        clocks = self.memory.clocks.own(self.batch.blocks)
        effect = self.memory.clocks.effect(site)
        if effect:
            self._synchronise(effect, site, lanes, flat, addresses)
        word = self.memory.word
        self.loose = np.zeros(len(flat), np.bool_)
        for touched, part in chosen.regions():
            region = touched.home or touched
            words, first = region.words(word, word)
            if region.index not in self.memory.traces:
                self.memory.traces[region.index] = Trace(len(words), self.batch.threads)
            own = None if data is None else tuple(d[part] for d in data)
            start = (addresses[part] - first) // word
            access = self._access(site, lanes, flat[part], start, words, own, clocks)
            access.label, trace = region.label, self.memory.traces[region.index]
            if site.kind == "atomic" and self.memory.sums is not None:
                self.loose[part] = self._loose(site, access, trace, len(flat[part]))
            self._check(site, lanes, access, trace, flat[part])

    def shared_access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        flat: Array,
        start: Array,
        data: tuple[Array, ...] | None,
    ) -> None:
        """Check and note an access of shared memory; `start` counts bytes over all rows."""
        if not len(flat):
            return
        if self.memory.unwritten is not None:
            bytes_ = start[:, None] + np.arange(site.bytes)
            missing = ~self.shared_written[bytes_].all(axis=1)
            if site.kind != "write" and missing.any():
                self._unread(site, lanes, int(flat[int(np.argmax(missing))]), "shared memory")
            self.shared_written[bytes_] |= site.kind != "read"
        if self.memory.races:
            word = self.memory.word
            content = self.batch.shared.reshape(-1).view(f"u{word}")
            clocks = np.zeros(len(self.batch.blocks), np.int64)
            access = self._access(site, lanes, flat, start // word, content, data, clocks)
            if site.kind == "atomic" and self.memory.sums is not None:
                self.loose = self._loose(site, access, self.shared_trace, len(flat))
            self._check(site, lanes, access, self.shared_trace, flat)

    def summed(
        self,
        kind: str,
        words: Array,
        index: Array,
        turns: tuple[Array, Array, Array],
        part: Array | slice,
    ) -> None:
        """Shake the sums among these that another order of threads would change."""
        if self.memory.sums is not None:
            self.memory.sums.shake(kind, words, index, turns, self.loose[part])

    # --- unwritten memory ------------------------------------------------------------------

    def _initialised(
        self,
        site: MemoryOp,
        lanes: Lanes,
        flat: Array,
        addresses: Array,
        unwritten: Unwritten,
    ) -> None:
        bytes_ = addresses[:, None] + np.arange(site.bytes)
        if site.kind != "write":
            missing = unwritten.unread(bytes_).any(axis=1)
            if missing.any():
                first = int(np.argmax(missing))
                what = self._place(int(addresses[first]))
                self._unread(site, lanes, int(flat[first]), what)
        if site.kind != "read":
            unwritten.write(bytes_.reshape(-1))

    def _place(self, address: int) -> str:
        region = self.batch.regions.find(address, address + 1)
        if region is None:
            return f"global memory at address {address:#x}"
        return f"{region.label} at byte offset {address - region.start}"

    def _unread(self, site: MemoryOp, lanes: Lanes, flat: int, what: str) -> None:
        assert self.memory.unwritten is not None
        self.memory.unwritten.report(
            f"{site.kind} of {site.bytes} bytes of {what} that nothing has written; "
            f"{site.where(flat, lanes)}"
        )

    # --- races -----------------------------------------------------------------------------

    def _access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        flat: Array,
        start: Array,
        content: Array,
        data: tuple[Array, ...] | None,
        clocks: Array,
    ) -> Access:
        rows = stretched(lanes.row_index, lanes.shape).reshape(-1)[flat]
        threads = stretched(lanes.thread_index, lanes.shape).reshape(-1)[flat]
        blocks = self.batch.blocks[rows]
        event = np.stack(
            [
                blocks * self.batch.threads + threads,
                self.epochs.block[rows],
                self.epochs.warp[rows, threads // 32],
                clocks[rows],
                np.full(len(flat), self.memory.number(site)),
            ],
            axis=1,
        )
        words = site.bytes // self.memory.word
        place = (start[:, None] + np.arange(words)).reshape(-1)
        lane = np.repeat(np.arange(len(flat)), words)
        changed, value = np.ones(len(place), np.bool_), None
        if data is not None and site.kind == "write":
            stored = np.stack([np.ascontiguousarray(d) for d in data], axis=1)
            value = stored.view(content.dtype).reshape(-1)
            changed = content[place] != value
        return Access(place, lane, event[lane], changed, value)

    def _check(
        self, site: MemoryOp, lanes: Lanes, access: Access, trace: Trace, flat: Array
    ) -> None:
        if site.kind != "read":
            self._stores(site, access)
        atomic = site.kind == "atomic"
        earlier = trace.write[access.place]
        plain = ~(trace.atomic[access.place] & atomic)
        silent = trace.silent[access.place]
        if "cta" in site.instruction.parts:
            plain |= self._foreign(earlier, access)
        self._compare(site, lanes, access, earlier, plain & access.changed, flat)
        # Whoever stores what is there already may come late, and undo another value.
        undone = self._foreign(silent, access) & access.changed & (site.kind != "read")
        self._compare(site, lanes, access, silent, undone, flat)
        if site.kind == "read":
            trace.read(access.place, access.event)
            return
        for reads in trace.reads:
            self._compare(site, lanes, access, reads[access.place], access.changed, flat)
        if access.value is not None:
            self._compare_within(site, lanes, access, flat)
        kept = access.changed
        trace.silent[access.place[~kept]] = access.event[~kept]
        trace.write[access.place[kept]] = access.event[kept]
        trace.atomic[access.place[kept]] = atomic

    def _foreign(self, earlier: Array, access: Access) -> Array:
        """Flags of the words whose earlier event is another block's."""
        threads = self.batch.threads
        return np.asarray(earlier[:, 0] // threads != access.event[:, 0] // threads)

    def _compare(
        self,
        site: MemoryOp,
        lanes: Lanes,
        access: Access,
        earlier: Array,
        wanted: Array,
        flat: Array,
    ) -> None:
        """Raise if an earlier event has no order with this one."""
        now, threads = access.event, self.batch.threads
        suspect = wanted & (earlier[:, 0] != NOBODY) & (earlier[:, 0] != now[:, 0])
        if not suspect.any():
            return
        same_block, warps = self._near(earlier, now)
        ordered = same_block & ((earlier[:, 1] < now[:, 1]) | (warps & (earlier[:, 2] < now[:, 2])))
        for index in np.flatnonzero(suspect & ~ordered):
            one, two = earlier[index], now[index]
            other = self.memory.sites[int(one[4])]
            blocks = one[0] // threads != two[0] // threads
            free = strong(site, blocks) and strong(other, blocks)
            if free and not self.memory.by_chance(site, other, bool(blocks)):
                continue
            if self._ordered(one, two):
                continue
            after = (
                other.kind == "read" and site.kind == "write" and warps[index] & same_block[index]
            )
            if after and self.memory.handed_on(other, site):
                continue
            said = self._said(site, lanes, flat[access.lane[index]], one, access.label)
            read = one if other.kind == "read" else two
            within = one[0] // threads == two[0] // threads and site.space == "global"
            if within and "read" in (site.kind, other.kind):
                load = self.memory.sites[int(read[4])].instruction
                if not self._used(int(read[0]), int(read[4]), load):
                    waiting = self.idle.setdefault(int(read[0]), [])
                    if all(load is not known for _, known in waiting):
                        waiting.append((said, load))
                    continue
            raise Race(said)

    def _near(self, earlier: Array, now: Array) -> tuple[Array, Array]:
        """Flags of the events that are of one block, and of warps of one number."""
        block, thread = np.divmod(earlier[:, 0], self.batch.threads)
        own_block, own_thread = np.divmod(now[:, 0], self.batch.threads)
        return block == own_block, thread // 32 == own_thread // 32

    def _loose(self, site: MemoryOp, access: Access, trace: Trace, threads: int) -> Array:
        """Flags of the threads that may come before the last one at their word as well as after it.

        Threads of one warp take their turns in one order always. Blocks that release and acquire
        have an order, but it is chance that gave it, unless they wait for one another: and not for
        a swap to succeed.
        """
        now, earlier = access.event, trace.write[access.place]
        order = np.argsort(access.place, kind="stable")
        again = np.flatnonzero(access.place[order][1:] == access.place[order][:-1])
        earlier[order[again + 1]] = now[order[again]]
        same_block, warps = self._near(earlier, now)
        ordered = same_block & (warps | (earlier[:, 1] < now[:, 1]))
        loose = np.zeros(threads, np.bool_)
        for index in np.flatnonzero((earlier[:, 0] != NOBODY) & ~ordered):
            waits = self.memory.waits and "cas" not in site.instruction.parts
            fixed = bool(same_block[index]) or waits
            loose[access.lane[index]] |= not (fixed and self._ordered(earlier[index], now[index]))
        return loose

    def _used(self, thread: int, read: int, load: Instruction) -> bool:
        """True if a thread has stored since an access what may derive from it."""
        stores = self.stored.get(thread, {}).items()
        return any(number > read and self.memory.feeds(load, store) for store, number in stores)

    def _stores(self, site: MemoryOp, access: Access) -> None:
        """Note who stores; raise if that derives from what another thread of its block wrote."""
        threads, store = np.unique(access.event[:, 0]).tolist(), id(site.instruction)
        for thread in threads:
            self.stored.setdefault(thread, {})[store] = int(access.event[0, 4])
        for thread in sorted(self.idle.keys() & threads):
            for said, load in self.idle[thread]:
                if self.memory.feeds(load, store):
                    raise Race(said)

    def _ordered(self, earlier: Array, now: Array) -> bool:
        """True if threads have met, or blocks have synchronised, since an earlier event."""
        before, after = int(earlier[0]) // self.batch.threads, int(now[0]) // self.batch.threads
        if before == after:
            return self.epochs.met_since(earlier, int(now[0]))
        one, two = int(earlier[0]) % self.batch.threads, int(now[0]) % self.batch.threads
        met = self.epochs.after(self.epochs.row(after), two, int(now[2]))
        return self.memory.clocks.ordered(before, one, earlier, (after, int(now[1])), met)

    def _compare_within(self, site: MemoryOp, lanes: Lanes, access: Access, flat: Array) -> None:
        """Raise if two values are stored to one word by this very instruction."""
        assert access.value is not None
        order = np.argsort(access.place, kind="stable")
        place, value = access.place[order], access.value[order]
        clash = (place[1:] == place[:-1]) & (value[1:] != value[:-1])
        if clash.any():
            index = int(np.argmax(clash))
            lane, event = access.lane[order[index + 1]], access.event[order[index]]
            raise Race(self._said(site, lanes, flat[lane], event, access.label))

    def _said(self, site: MemoryOp, lanes: Lanes, flat: int, earlier: Array, label: str) -> str:
        other = self.memory.sites[int(earlier[4])]
        block, thread = divmod(int(earlier[0]), self.batch.threads)
        where = other.instruction.place
        what = label or f"{site.space} memory"
        return (
            f"{site.kind} of {site.bytes} bytes of {what} without order after a "
            f"{other.kind} at {where} by block {self.batch.block_place_of(block)}, thread "
            f"{self.batch.thread_place(thread)}; {site.where(int(flat), lanes)}."
        )

    def fence(
        self, lanes: Lanes, guard: Array | None, scope: str, acquires: bool, releases: bool
    ) -> None:
        """These threads pass a fence, which orders accesses of blocks if its scope reaches them."""
        if not self.memory.races or scope == "cta":
            return
        passing = np.ones(lanes.size, np.bool_)
        if guard is not None:
            passing = stretched(guard, lanes.shape).reshape(-1)
        for row, _, joining in self.epochs.joining(lanes, np.flatnonzero(passing)):
            block, met = int(self.batch.blocks[row]), partial(self.epochs.after, row)
            self.memory.clocks.fence(acquires, releases, block, joining, met)

    def _synchronise(
        self, effect: Effect, site: MemoryOp, lanes: Lanes, flat: Array, addresses: Array
    ) -> None:
        for row, here, joining in self.epochs.joining(lanes, flat):
            self.memory.clocks.access(
                effect,
                int(self.batch.blocks[row]),
                joining,
                addresses[here].tolist(),
                partial(self.epochs.after, row),
                replaces=site.kind == "write",
            )
