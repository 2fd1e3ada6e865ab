"""Accesses whose space is only known from the address."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.access import LOCAL_WINDOW, SHARED_WINDOW, Site
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.ptx.syntax import Instruction

_TOP = np.uint64(48)
WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


def space_of(address: Array) -> dict[str, Array]:
    """For each space that occurs, which addresses are in it."""
    top = address >> _TOP
    spaces = {name: top == np.uint64(base >> 48) for name, base in WINDOWS.items()}
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
                address - np.uint64(WINDOWS.get(name, 0)),
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
            old = site.load(lanes, own, both_hold(guard, mask), old)
        return old

    def store(
        self, lanes: Lanes, address: Array, guard: Array | None, values: tuple[Array, ...]
    ) -> None:
        """As `Site.store`."""
        for site, own, mask in self._split(address):
            site.store(lanes, own, both_hold(guard, mask), values)


def both_hold(a: Array | None, b: Array | None) -> Array | None:
    """The conjunction of two guards, of which None always holds."""
    if a is None or b is None:
        return b if a is None else a
    return np.asarray(a & b)
