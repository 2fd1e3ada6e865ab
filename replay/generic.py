"""Accesses whose space is only known from the address, and asynchronous copies."""

from __future__ import annotations

import numpy as np

from twinstep.replay.access import LOCAL_WINDOW, SHARED_WINDOW, Site
from twinstep.replay.dtypes import Array
from twinstep.replay.lanes import Lanes
from twinstep.replay.syntax import Instruction

_TOP = np.uint64(48)
_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


def space_of(address: Array) -> dict[str, Array]:
    """For each space that occurs, which addresses are in it."""
    top = address >> _TOP
    spaces = {name: top == np.uint64(base >> 48) for name, base in _WINDOWS.items()}
    spaces["global"] = ~(spaces["shared"] | spaces["local"])
    return {name: mask for name, mask in spaces.items() if mask.any()}


class GenericSite:
    """A load or store without a state space: each thread's address decides."""

    def __init__(
        self, instruction: Instruction, kind: str, size: int, count: int, offset: int
    ) -> None:
        self.offset = np.uint64(offset % 2**64)
        self.sites = {
            space: Site(instruction, kind, space, size, count, 0)
            for space in ("global", "shared", "local")
        }

    def _split(self, address: Array) -> list[tuple[Site, Array, Array | None]]:
        address = address + self.offset
        spaces = space_of(address)
        return [
            (
                self.sites[name],
                address - np.uint64(_WINDOWS.get(name, 0)),
                mask if len(spaces) > 1 else None,
            )
            for name, mask in spaces.items()
        ]

    def load(
        self, lanes: Lanes, address: Array, guard: Array | None, old: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """As `Site.load`."""
        parts = self._split(address)
        if len(parts) > 1 and not old:
            zero = np.zeros((1, 1), parts[0][0].word)
            old = (zero,) * parts[0][0].count
        for site, own, mask in parts:
            old = site.load(lanes, own, _both(guard, mask), old)
        return old

    def store(
        self, lanes: Lanes, address: Array, guard: Array | None, values: tuple[Array, ...]
    ) -> None:
        """As `Site.store`."""
        for site, own, mask in self._split(address):
            site.store(lanes, own, _both(guard, mask), values)


def _both(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return np.asarray(a & b)


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
            whole = _both(guard, np.asarray(copied >= np.uint32(self.size)))
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
            wanted = _both(guard, some & (copied > np.uint32(index)))
            byte = site.load(lanes, source, wanted, none)[0].astype(self.read.word)
            word, place = divmod(index, self.read.size)
            words[word] = words[word] | byte << self.read.word.type(8 * place)
        return tuple(words)
