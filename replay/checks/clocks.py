"""The order between blocks: what each knows of the others through atomics.

A thread that releases makes known its own accesses, and those of other threads of its block that a
barrier has put before. What one thread acquires counts as known to its whole block.
"""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array

Release = tuple[int, int, Array]
"""A thread, the epoch of its block, and per warp the epoch before which the thread has met it."""

_ORDERING = frozenset({"acquire", "release", "acq_rel"})


class Clocks:
    """A clock per block that advances at its atomics, and how far each block knows the others'.

    Args:
        fenced: Whether the kernel has fences, which give order to relaxed atomics as well.
    """

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced
        self.time: dict[int, int] = {}
        self.known: dict[int, dict[int, int]] = {}
        self.released: dict[int, dict[int, int]] = {}
        self.releases: dict[int, list[Release]] = {}
        """Of each block, one for each of its clocks."""

    def own(self, blocks: Array) -> Array:
        """The clocks of some blocks."""
        return np.array([self.time.get(block, 0) for block in blocks.tolist()], np.int64)

    def ordered(self, before: int, thread: int, event: Array, after: int) -> bool:
        """True if block `after` has synchronised with an event since then.

        Args:
            before: The block of the event.
            thread: The thread of the event, within its block.
            event: See `races.Trace`.
            after: The other block.
        """
        clock, last = int(event[3]), self.known.get(after, {}).get(before, -1)
        if last < clock:
            return False
        releases = self.releases[before]
        # Epochs never fall, so that the last release is the one after most barriers.
        _, epoch, warps = releases[last]
        if event[1] < epoch:
            return True
        known = releases[clock : last + 1]
        return any(t == thread or event[2] < warps[thread // 32] for t, _, warps in known)

    def atomic(
        self,
        blocks: Array,
        releases: list[Release],
        addresses: Array,
        parts: tuple[str, ...],
    ) -> None:
        """Threads of these blocks touch addresses atomically, in this order."""
        if not (self.fenced or _ORDERING & set(parts)) or "cta" in parts:
            return
        for block, release, address in zip(
            blocks.tolist(), releases, addresses.tolist(), strict=True
        ):
            known = self.known.setdefault(block, {})
            for other, clock in self.released.get(address, {}).items():
                known[other] = max(known.get(other, -1), clock)
            released = self.released.setdefault(address, {})
            released.update(known)
            released[block] = self.time.get(block, 0)
            self.time[block] = self.time.get(block, 0) + 1
            self.releases.setdefault(block, []).append(release)
