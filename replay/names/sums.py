"""Sums in which names lose their order: integers that are added by many threads, in any order.

Some code forms a sum by integers whose size, place and number depend on the data, so that no
expression of it could be compared. Inside such code, which whoever starts the session points out, a
result has the *mix* of what it was made of: the set of the elements that entered. Conditions there
are not followed. What leaves the code by way of its rounding takes the name of the sum of the same
elements that the other side has told, if it has that sum's bits in this run.

A mix is equal to no expression, so that whatever a sum reaches without such a name is not proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from twinstep.replay.names.table import Table

INSIDE, ROUNDS = "inside", "rounds"
Places = Callable[[str, int], str]
"""For a file and a line: `INSIDE` a sum, where it `ROUNDS`, or neither."""
EXACT = ("cvt.f32.f16", "cvt.f64.f32", "cvt.f32.bf16")
UNSIGNED = {"and.b16": 0x7FFF, "and.b32": 0x7FFF_FFFF}
ONE = 0x3F80_0000
WIDE_MASK, WIDE_INFINITY = 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000


def nowhere(file: str, line: int) -> str:
    """No sums anywhere."""
    return ""


@dataclass(frozen=True)
class Sum:
    """A sum that one side has told.

    Attributes:
        norm: number of its root in float32.
        bits: of that in this run.
        flag: number of the predicate that an element is not finite.
        outcome: of that in this run.
    """

    norm: int
    bits: int
    flag: int
    outcome: bool


class _Mixes(dict[tuple[int, ...], int]):
    """Mixes, each made when it is first looked up: a lookup for each lane of an instruction."""

    def __init__(self, make: Callable[[tuple[int, ...]], int]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, numbers: tuple[int, ...]) -> int:
        found = self[numbers] = self.make(numbers)
        return found


@dataclass
class Sums:
    """The sums of a session.

    Attributes:
        places: where the code of sums is.
        told: by the bag of elements.
        came: from which bag what has left came, should a sum meet it again.
    """

    places: Places = nowhere
    told: dict[int, Sum] = field(default_factory=dict)
    came: dict[int, int] = field(default_factory=dict)
    _mixes: dict[int, _Mixes] = field(default_factory=dict)

    def mixes(self, table: Table, granules: int) -> Mapping[tuple[int, ...], int]:
        """The mix of numbers, -1 among them for plain bits; -1 of plain bits alone."""
        if granules not in self._mixes:
            self._mixes[granules] = _Mixes(
                lambda numbers: mix(
                    table, (self.origin(table, n) for n in numbers if n >= 0), granules
                )
            )
        return self._mixes[granules]

    def origin(self, table: Table, number: int) -> int:
        """The bag of what has left a sum, anything else as it is."""
        row = table.rows[number]
        narrow = row.args[0] if row.op in EXACT else number
        return self.came.get(number, self.came.get(narrow, number))

    @property
    def used(self) -> bool:
        """True if something took the name of a sum."""
        return bool(self.came)

    def left(self, table: Table, number: int, bits: int, granules: int) -> int:
        """The number of what leaves a sum with these bits; the mix itself if it is no known one."""
        row = table.rows[number]
        known = self.told.get(row.args[0]) if row.op == "mix" else None
        if known is None:
            return number
        found = self._name(table, known, number, bits, granules)
        if found != number:
            self.came[found] = row.args[0]
            self._mixes.clear()
        return found

    def _name(self, table: Table, known: Sum, number: int, bits: int, granules: int) -> int:
        if granules == 0:
            return known.flag if bool(bits) == known.outcome else table.row("not", (known.flag,), 0)
        wide = granules == 4 and _is_nan(known.bits) and bits & WIDE_MASK > WIDE_INFINITY
        if wide or granules == 4 and bits == _widened(known.bits):
            return table.row("cvt.f64.f32", (known.norm,), 4)
        if granules == 4:
            # The count of tiles that are not finite, which is only compared with 0.
            if bool(bits) != known.outcome:
                return number
            count, none = table.const(bits or 1, 4), table.const(0, 4)
            return table.row("if", (known.flag, count, none), 4)
        if bits == known.bits or _is_nan(bits) and _is_nan(known.bits):
            return known.norm
        if bits == (ONE if known.outcome else 0):
            return table.row("if", (known.flag, table.const(ONE, 2), table.const(0, 2)), 2)
        return number


def _widened(bits: int) -> int:
    return int(np.array(bits, np.uint32).view(np.float32).astype(np.float64).view(np.uint64))


def _is_nan(bits: int) -> bool:
    return bits & 0x7FFF_FFFF > 0x7F80_0000


def bag(table: Table, numbers: Iterable[int]) -> int:
    """The number of a set of elements, from what they were widened to, or masked."""
    return table.row("bag", sorted(set(numbers)), 8)


def mix(table: Table, numbers: Iterable[int], granules: int) -> int:
    """The number of a mix; -1 without any element."""
    whole = bag(table, numbers)
    return table.row("mix", (whole,), granules) if table.sets.bits[whole] else -1


def united(table: Table, numbers: Iterable[int]) -> int | None:
    """The bag that holds the elements of all these; None if it is new, and the next row."""
    sets, bits = table.sets, 0
    for number in numbers:
        bits |= _elements(table, number)
    found = sets.rows.get(bits)
    if found is None:
        sets.rows[bits] = len(table.rows)
        sets.bits[len(table.rows)] = bits
    return found


def _elements(table: Table, number: int) -> int:
    """The set of the elements in a value."""
    row, sets = table.rows[number], table.sets
    if row.op == "mix":
        return sets.bits[row.args[0]]
    if row.op == "bag":
        return sets.bits[number]
    if row.op == "const":
        return 0
    mask = UNSIGNED.get(row.op)
    masked = mask is not None and mask in [table.constant_bits(n) for n in row.args]
    if row.op in ("part", "join", *EXACT) or masked:
        bits = 0
        for part in row.args:
            bits |= _elements(table, part)
        return bits
    return sets.of(number)
