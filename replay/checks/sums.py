"""Sums whose bits depend on the order of threads are shaken, so that what depends on them shows.

Any order of floating atomic adds is one of a device's. A sum that rounds, of three terms or more,
comes out otherwise in another order, but seldom in those that a few runs happen to try. So it is
moved by a few units of its last place, as a long sum would be, and what is computed of it moves.
Sums that are exact stay as they are, and so do those of two terms and those that are in order.
"""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.rounding import bf16_to_f32

UNITS = {2: 1, 4: 32, 8: 32}
"""By how many units of its last place a sum is moved, by bytes."""
_TERMS = 3


def _values(kind: str, bits: Array) -> Array:
    """Words as float64."""
    if kind == "bf16":
        return bf16_to_f32(bits.view(np.uint16)).astype(np.float64)
    return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(
        np.float64
    )


def _rounds(one: Array, other: Array, total: Array) -> Array:
    """Flags of the sums that are not exact, of finite numbers."""
    near = one + other
    back = near - one
    error = (one - (near - back)) + (other - back)
    return np.asarray(((error != 0) | (near != total)) & np.isfinite(total))


class Sums:
    """The terms that words of memory have been given in one launch, by address."""

    def __init__(self) -> None:
        self.terms: dict[int, int] = {}
        self.mixed: set[int] = set()
        """Words whose terms may have come in another order."""

    def shake(
        self, kind: str, words: Array, index: Array, turns: tuple[Array, Array, Array], loose: Array
    ) -> None:
        """Move the sums whose bits another order would change.

        Args:
            kind: `f16`, `bf16`, `f32` or `f64`.
            words: Bits of the memory, after the adds.
            index: Word of each add, in the order of their turns.
            turns: Bits of what each found, of its term, and of what it left.
            loose: Whether each has no order with the one before at its word.
        """
        found, term, left = (_values(kind, bits) for bits in turns)
        rounds = _rounds(found, term, left)
        base = words.__array_interface__["data"][0]
        address = (base + index * words.itemsize).tolist()
        moved = set()
        for turn, place in enumerate(address):
            terms = self.terms.get(place, int(found[turn] != 0)) + int(term[turn] != 0)
            self.terms[place] = terms
            if loose[turn]:
                self.mixed.add(place)
            if rounds[turn] and terms >= _TERMS and place in self.mixed:
                moved.add(int(index[turn]))
        if moved:
            chosen = np.fromiter(moved, np.int64)
            near = words[chosen] + words.dtype.type(UNITS[words.itemsize])
            words[chosen] = np.where(np.isfinite(_values(kind, near)), near, words[chosen])
