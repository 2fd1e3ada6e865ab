"""Names of memory, granule by granule, page by page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.names.table import PLAIN

PAGE = 2048


class _Page:
    """Codes, bits at the time of the last store, whether there was one, and sums by atomics."""

    def __init__(self) -> None:
        self.code = np.full(PAGE, PLAIN, np.int64)
        self.bits = np.zeros(PAGE, np.uint16)
        self.known = np.zeros(PAGE, np.bool_)
        self.summed = np.zeros(PAGE, np.bool_)


class NamedMemory:
    """Codes by granule.

    A granule that nothing has stored under names, or whose bits have changed since, counts as
    foreign: the host may have computed it from what has a name.

    Attributes:
        foreign: where such a granule was read first; empty if none was.
    """

    def __init__(self) -> None:
        self.pages: dict[int, _Page] = {}
        self.foreign = ""
        self.free: set[int] = set()

    def _pages(self, places: Array) -> Iterator[tuple[_Page, Array, Array]]:
        numbers = places // PAGE
        for number in np.unique(numbers):
            page = self.pages.setdefault(int(number), _Page())
            which = np.flatnonzero(numbers == number)
            yield page, which, places[which] - number * PAGE

    def store(self, places: Array, codes: Array, bits: Array) -> None:
        """Put granules down; all arguments are flat."""
        for page, which, at in self._pages(places):
            page.code[at], page.bits[at], page.known[at] = codes[which], bits[which], True
            page.summed[at] = False

    def sum(self, places: Array, codes: Array) -> None:
        """Let granules hold these codes whatever their bits: atomics have put them there."""
        for page, which, at in self._pages(places):
            page.code[at], page.known[at], page.summed[at] = codes[which], True, True

    def load(self, places: Array, bits: Array, site: str = "") -> Array:
        """The codes of granules that hold these bits; a site notes foreign ones."""
        codes = np.full(len(places), PLAIN, np.int64)
        for page, which, at in self._pages(places):
            valid = page.known[at] & (page.summed[at] | (page.bits[at] == bits[which]))
            codes[which] = np.where(valid, page.code[at], PLAIN)
            lost = places[which][~valid]
            if site and len(lost) and not self.free.issuperset(lost.tolist()):
                self.foreign = self.foreign or site
        return codes

    def held(self, places: Array) -> Array:
        """The codes of granules, whatever bits they hold now."""
        codes = np.full(len(places), PLAIN, np.int64)
        for page, which, at in self._pages(places):
            codes[which] = page.code[at]
        return codes

    def forget(self, places: Array) -> None:
        """Let granules hold any bits from now on: an atomic puts plain numbers there."""
        for page, _, at in self._pages(places):
            page.code[at] = PLAIN
        self.free.update(places.tolist())
