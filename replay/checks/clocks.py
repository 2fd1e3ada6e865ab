"""The order between blocks: what each knows of the others through atomics."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array

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

    def own(self, blocks: Array) -> Array:
        """The clocks of some blocks."""
        return np.array([self.time.get(block, 0) for block in blocks.tolist()], np.int64)

    def ordered(self, before: int, clock: int, after: int) -> bool:
        """True if block `after` has synchronised with `before` since it showed `clock`."""
        return self.known.get(after, {}).get(before, -1) >= clock

    def atomic(self, blocks: Array, addresses: Array, parts: tuple[str, ...]) -> None:
        """Blocks touch addresses atomically, in this order."""
        if not (self.fenced or _ORDERING & set(parts)) or "cta" in parts:
            return
        for block, address in zip(blocks.tolist(), addresses.tolist(), strict=True):
            known = self.known.setdefault(block, {})
            for other, clock in self.released.get(address, {}).items():
                known[other] = max(known.get(other, -1), clock)
            released = self.released.setdefault(address, {})
            released.update(known)
            released[block] = self.time.get(block, 0)
            self.time[block] = self.time.get(block, 0) + 1
