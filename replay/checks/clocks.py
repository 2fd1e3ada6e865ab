"""The order between blocks: what each thread knows of other blocks through atomics.

A thread that releases makes known what it knows itself: its own accesses, those of threads of its
block that a barrier has put before, and what it has acquired. What a thread acquires is known to
it, and to others of its block after a barrier that joins them. Where many threads of a block meet
in one instruction, what one of them acquires counts as known to all, and a release as made by any.

A fence is half of a release, and a relaxed access behind it the other half: what was known at the
fence is handed on, by its thread and by those that a barrier has joined with it since. For
acquiring it is the other way round: a relaxed access, then a fence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.lanes import MemoryOp

Release = tuple[int, int, Array]
"""A thread, the epoch of its block, and per warp the epoch before which the thread has met it."""

Entry = tuple[int, tuple[tuple[int, int], ...]]
"""The number of a block's last release that many threads made, all of which up to there count as
known; and for each thread that released alone, the thread and the number of its last release.
"""

Known = dict[int, Entry]
"""An entry for each block."""

Met = Callable[[int, int], bool]
"""True if one thread comes after what another of its block did in an epoch of its warp."""

MANY = 4
"""Above so many threads of a block in one instruction, they are not told apart."""

STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})


def strong(site: MemoryOp, blocks: bool) -> bool:
    """True if other threads may touch the same word meanwhile, as long as they are strong too.

    Args:
        site: An access.
        blocks: Whether the other thread is of another block, which the scope `.cta` leaves out.
    """
    parts = site.instruction.parts
    if blocks and "cta" in parts:
        return False
    return site.kind == "atomic" or not STRONG.isdisjoint(parts)


@dataclass(frozen=True)
class Effect:
    """The part of an access in the order between blocks.

    Attributes:
        acquires: What was released at the address is known at once.
        releases: What is known is released at the address.
        takes: The first, but once a fence follows.
        gives: The second, but what was known at a fence before.
    """

    acquires: bool = False
    releases: bool = False
    takes: bool = False
    gives: bool = False

    def __bool__(self) -> bool:
        return self.acquires or self.releases or self.takes or self.gives


class Knowledge:
    """Releases that have come to each thread; all of a block have those from before a barrier.

    Args:
        learn: Adds to what is known.
    """

    def __init__(self, learn: Callable[[Known, Known], None]) -> None:
        self.learn = learn
        self.settled: dict[int, Known] = {}
        """What all threads of a block have."""
        self.pending: dict[int, tuple[int, dict[tuple[int, int], Known]]] = {}
        """Epoch of a block, and what came to threads in it, by thread and epoch of the warp."""

    def before(self, block: int, epoch: int) -> Known:
        """Releases that all threads of a block have in an epoch: those of the epochs before."""
        settled = self.settled.setdefault(block, {})
        began, pending = self.pending.setdefault(block, (epoch, {}))
        if began < epoch:
            for known in pending.values():
                self.learn(settled, known)
            self.pending[block] = epoch, {}
        return settled

    def of_thread(self, block: int, epoch: int, who: tuple[int, int], met: Met) -> Known:
        """Releases that a thread has in an epoch of its warp; to be added to."""
        settled = self.before(block, epoch)
        pending = self.pending[block][1]
        if who not in pending:
            known = dict(settled)
            for other, came in pending.items():
                if met(*other):
                    self.learn(known, came)
            pending[who] = known
        return pending[who]

    def of_all(self, block: int, epoch: int) -> Known:
        """The same where the threads of a block are not told apart."""
        settled = self.before(block, epoch)
        for known in self.pending[block][1].values():
            self.learn(settled, known)
        self.pending[block][1].clear()
        return settled


class Clocks:
    """Releases of each block, numbered, and those that each thread knows of.

    Args:
        fenced: Whether the kernel has fences; without any, relaxed accesses give no order.
    """

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced
        self.releases: dict[int, list[Release]] = {}
        self.released: dict[int, Known] = {}
        """Per address, what is acquired there."""
        self.known = Knowledge(self._learn)
        self.taken = Knowledge(self._learn)
        """What the next fence of a thread makes known to it."""
        self.given = Knowledge(self._learn)
        """What was known at the last fence of a thread."""

    def own(self, blocks: Array) -> Array:
        """The number of the next release of some blocks."""
        return np.array([len(self.releases.get(b, ())) for b in blocks.tolist()], np.int64)

    def effect(self, site: MemoryOp) -> Effect:
        """The effect of an access on other blocks."""
        if not strong(site, True):
            return Effect()
        parts = {*site.instruction.parts}
        reads, writes = site.kind != "write", site.kind != "read"
        acquires = reads and not parts.isdisjoint({"acquire", "acq_rel"})
        releases = writes and not parts.isdisjoint({"release", "acq_rel"})
        return Effect(
            acquires,
            releases,
            takes=self.fenced and reads and not acquires,
            gives=self.fenced and writes and not releases,
        )

    def ordered(
        self,
        before: int,
        thread: int,
        event: Array,
        now: tuple[int, int],
        met: Met,
    ) -> bool:
        """True if a thread knows of an event of another block.

        Args:
            before: The block of the event.
            thread: The thread of the event, within its block.
            event: See `races.Trace`.
            now: The other block, and its epoch.
            met: Of the thread that asks.
        """
        if self._covers(self.known.before(*now), before, thread, event):
            return True
        pending = self.known.pending[now[0]][1].items()
        return any(
            met(*who) and self._covers(known, before, thread, event) for who, known in pending
        )

    def _covers(self, known: Known, before: int, thread: int, event: Array) -> bool:
        """True if a release of these was made by a thread that came after an event."""
        if before not in known:
            return False
        (last, alone), clock, releases = known[before], int(event[3]), self.releases[before]
        # Epochs never fall, so that the last release is the one after most barriers.
        if last >= clock and event[1] < releases[last][1]:
            return True
        numbers = [number for _, number in alone if number >= clock]
        return any(
            event[1] < epoch or t == thread or event[2] < warps[thread // 32]
            for t, epoch, warps in [*releases[clock : last + 1], *(releases[n] for n in numbers)]
        )

    def _learn(self, known: Known, other: Known) -> None:
        """Add to what is known."""
        for block, entry in other.items():
            mine = known.get(block)
            if mine is None:
                known[block] = entry
            elif mine is not entry:
                a, b = mine[1], entry[1]
                if mine[0] == entry[0] and len(a) == len(b) == 1 and a[0][0] == b[0][0]:
                    known[block] = max(mine, entry)
                elif mine[0] < entry[0] or b:
                    known[block] = self._joined(block, mine, entry)

    def _joined(self, block: int, one: Entry, two: Entry) -> Entry:
        """What follows from both."""
        last = max(one[0], two[0])
        alone = dict(one[1])
        for thread, number in two[1]:
            alone[thread] = max(alone.get(thread, -1), number)
        # A release after a barrier covers those before it.
        releases = self.releases[block]
        newest = max((releases[number][1] for number in alone.values()), default=0)
        kept = [(t, n) for t, n in alone.items() if n > last and releases[n][1] == newest]
        return last, tuple(kept)

    def access(
        self,
        effect: Effect,
        block: int,
        threads: list[tuple[Release, int]],
        addresses: list[int],
        met: Callable[[int, int], Met],
        replaces: bool,
    ) -> None:
        """Threads of one block touch addresses, in this order.

        Args:
            effect: See `effect`.
            block: The block.
            threads: The release that each would make, and the epoch of its warp.
            addresses: One for each.
            met: Of a thread in an epoch of its warp.
            replaces: Whether what was released at the addresses is lost: they are stored to.
        """
        many = len(threads) > MANY
        for (release, warp_epoch), address in zip(threads, addresses, strict=True):
            has = partial(_has, block, release, warp_epoch, met, many)
            if effect.acquires and address in self.released:
                self._learn(has(self.known), self.released[address])
            if effect.takes and address in self.released:
                self._learn(has(self.taken), self.released[address])
            if effect.releases:
                known = self._release(block, release, has(self.known), many)
            elif effect.gives:
                known = dict(has(self.given))
            else:
                continue
            # Who acquires and releases hands on what was released there as well.
            whole = effect.acquires and effect.releases
            if whole or replaces or address not in self.released:
                self.released[address] = known
            else:
                self._learn(self.released[address], known)

    def fence(
        self,
        acquires: bool,
        releases: bool,
        block: int,
        threads: list[tuple[Release, int]],
        met: Callable[[int, int], Met],
    ) -> None:
        """Threads of one block pass a fence; arguments as of `access`."""
        many = len(threads) > MANY
        if many and releases:
            # What the last of them makes known counts as everybody's.
            self.releases.setdefault(block, []).extend(release for release, _ in threads[:-1])
        for release, warp_epoch in threads[-1:] if many else threads:
            has = partial(_has, block, release, warp_epoch, met, many)
            known = has(self.known)
            if acquires:
                self._learn(known, has(self.taken))
            if releases:
                self._learn(has(self.given), self._release(block, release, known, many))

    def _release(self, block: int, release: Release, known: Known, many: bool) -> Known:
        """Number a release, and return what it makes known."""
        number = len(self.releases.setdefault(block, []))
        self.releases[block].append(release)
        made = dict(known)
        self._learn(made, {block: (number, ()) if many else (-1, ((release[0], number),))})
        return made


def _has(
    block: int,
    release: Release,
    warp_epoch: int,
    met: Callable[[int, int], Met],
    many: bool,
    knowledge: Knowledge,
) -> Known:
    """What a thread has, or all of its block where they are not told apart; to be added to."""
    thread, epoch, _ = release
    if many:
        return knowledge.of_all(block, epoch)
    return knowledge.of_thread(block, epoch, (thread, warp_epoch), met(thread, warp_epoch))
