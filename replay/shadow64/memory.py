"""Shadows of memory, page by page, for global memory and for a batch's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.shadow64.values import SHADOW, Shadow, halves

PAGE = 2048


class _Page:
    """Wide values, kinds, bits at the time of the last store, and whether there was one."""

    def __init__(self) -> None:
        self.wide = np.zeros(PAGE)
        self.kind = np.zeros(PAGE, np.uint8)
        self.bits = np.zeros(PAGE, np.uint16)
        self.stored = np.zeros(PAGE, np.bool_)
        self.known = np.zeros(PAGE, np.bool_)


class ShadowMemory:
    """Shadows by granule; a granule whose bits have changed since is plain and counts as foreign.

    Attributes:
        foreign: whether something was read that neither a launch nor `fill` put there.
    """

    def __init__(self) -> None:
        self.pages: dict[int, _Page] = {}
        self.foreign = False

    def _pages(self, places: Array) -> Iterator[tuple[_Page, Array, Array]]:
        """For each page: it, which places lie there, and where."""
        numbers = places // PAGE
        for number in np.unique(numbers):
            page = self.pages.setdefault(int(number), _Page())
            which = np.flatnonzero(numbers == number)
            yield page, which, places[which] - number * PAGE

    def store(self, places: Array, wide: Array, kind: Array, bits: Array, launch: bool) -> None:
        """Put granules down.

        Args:
            places: granule numbers, flat, as all others.
            wide: float64.
            kind: as in a shadow.
            bits: uint16.
            launch: whether a launch stores them.
        """
        for page, which, at in self._pages(places):
            page.wide[at], page.kind[at] = wide[which], kind[which]
            page.bits[at], page.known[at] = bits[which], True
            page.stored[at] = launch

    def load(self, places: Array, bits: Array) -> tuple[Array, Array, Array]:
        """Wide value, kind, and whether a launch put it there, of granules that hold these bits."""
        wide, kind = np.zeros(len(places)), np.zeros(len(places), np.uint8)
        stored = np.zeros(len(places), np.bool_)
        for page, which, at in self._pages(places):
            valid = page.known[at] & (page.bits[at] == bits[which])
            wide[which] = np.where(valid, page.wide[at], 0.0)
            kind[which] = np.where(valid, page.kind[at], 0)
            stored[which] = valid & page.stored[at]
            self.foreign |= not bool(valid.all())
        return wide, kind, stored

    def last(self, places: Array) -> tuple[Array, Array]:
        """Wide value and kind of granules, whatever bits they hold now."""
        wide, kind = np.zeros(len(places)), np.zeros(len(places), np.uint8)
        for page, which, at in self._pages(places):
            wide[which], kind[which] = page.wide[at], page.kind[at]
        return wide, kind

    def numbers(self, places: Array, kind: str) -> Array:
        """The numbers whose bits were last put into whole elements of a float type."""
        bits = np.zeros(len(places), np.uint16)
        for page, which, at in self._pages(places):
            bits[which] = page.bits[at]
        dtype = np.float64 if kind == "f64" else np.float32
        return np.asarray(bits.view(dtype).astype(np.float64))


def access(
    lanes: Lanes, space: str, address: Array, offset: int, guard: Array | None
) -> tuple[Array, Array]:
    """Flat positions of the threads that access memory, and the granule where each word starts."""
    whole = np.broadcast_to(address.astype(np.int64) + offset, lanes.shape).reshape(-1)
    flat = np.arange(lanes.size)
    if guard is not None:
        flat = np.flatnonzero(np.broadcast_to(guard, lanes.shape))
    start = whole[flat] // 2
    if space in ("shared", "local"):
        owner = np.broadcast_to(lanes.row_index, lanes.shape).reshape(-1)[flat]
        if space == "local":
            threads = np.broadcast_to(lanes.thread_index, lanes.shape).reshape(-1)[flat]
            owner = owner * lanes.batch.threads + threads
        start = start + (owner.astype(np.int64) << 32)
    return flat, start


def load(
    memory: ShadowMemory, lanes: Lanes, flat: Array, start: Array, word: int, bits: Array
) -> Shadow:
    """The shadow of one loaded word; `bits` is what was loaded, in the shape of the lanes."""
    g = word // 2
    own = halves(np.broadcast_to(bits, lanes.shape)).reshape(lanes.size, -1)[flat]
    places = (start[:, None] + np.arange(g)).reshape(-1)
    foreign = memory.foreign
    wide, kind, _ = memory.load(places, np.ascontiguousarray(own).reshape(-1))
    if word == 8:
        memory.foreign = foreign  # tables of addresses are the host's own
    if not kind.any():
        return None
    result = np.zeros(lanes.size, SHADOW[g])
    result["w"][flat] = wide.reshape(-1, g)
    result["k"][flat] = kind.reshape(-1, g)
    return result.reshape(lanes.shape)


def store(
    memory: ShadowMemory,
    lanes: Lanes,
    flat: Array,
    start: Array,
    word: int,
    bits: Array,
    shadow: Shadow,
) -> None:
    """Store one word of each thread; where two write one place, the higher thread's stays."""
    g = word // 2
    own = halves(np.broadcast_to(bits, lanes.shape)).reshape(lanes.size, -1)[flat]
    places = (start[:, None] + np.arange(g)).reshape(-1)
    wide, kind = np.zeros((len(flat), g)), np.zeros((len(flat), g), np.uint8)
    if shadow is not None:
        whole = np.broadcast_to(shadow, lanes.shape).reshape(-1)[flat]
        wide, kind = whole["w"], whole["k"]
    memory.store(
        places, wide.reshape(-1), kind.reshape(-1), np.ascontiguousarray(own).reshape(-1), True
    )
