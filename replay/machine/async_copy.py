"""Asynchronous copies from global to shared memory, carried out at once."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.access import Site
from twinstep.replay.machine.generic_access import both_hold
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.ptx.syntax import Instruction


class AsyncCopy:
    """cp.async: global to shared, `size` bytes per thread, the rest of them zero."""

    def __init__(
        self, instruction: Instruction, size: int, to_offset: int, from_offset: int
    ) -> None:
        word = min(size, 4)
        self.size, self.count = size, size // word
        self.read = Site(instruction, "read", "global", word, self.count, from_offset)
        self.write = Site(instruction, "write", "shared", word, self.count, to_offset)
        self.bytes = [
            Site(instruction, "read", "global", 1, 1, from_offset + i) for i in range(size)
        ]

    def run(
        self, lanes: Lanes, to: Array, source: Array, guard: Array | None, copied: Array | None
    ) -> None:
        """Copy; where fewer bytes than `size` are to be copied, the remainder is zero."""
        zero = (np.zeros((1, 1), self.read.word),) * self.count
        if copied is None:
            values = self.read.load(lanes, source, guard, zero)
        else:
            whole = both_hold(guard, np.asarray(copied >= np.uint32(self.size)))
            values = self.read.load(lanes, source, whole, zero)
            if ((copied > 0) & (copied < np.uint32(self.size))).any():
                values = self._part(lanes, source, guard, copied, values)
        self.write.store(lanes, to, guard, values)

    def _part(
        self,
        lanes: Lanes,
        source: Array,
        guard: Array | None,
        copied: Array,
        values: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """Threads that copy fewer bytes read no byte more: one after the other."""
        some, none = copied < np.uint32(self.size), (np.zeros((1, 1), np.uint8),)
        words = list(values)
        for index, site in enumerate(self.bytes):
            wanted = both_hold(guard, some & (copied > np.uint32(index)))
            byte = site.load(lanes, source, wanted, none)[0].astype(self.read.word)
            word, place = divmod(index, self.read.size)
            words[word] = words[word] | byte << self.read.word.type(8 * place)
        return tuple(words)
