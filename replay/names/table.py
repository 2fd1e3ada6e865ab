"""Hash-consed expressions: every value of a kernel is the number of a row in one table.

A row is an operation with its rounding, applied to earlier rows. Leaves are elements of tensors
(any value) and constants (bits). Equal rows have equal numbers, so that equal numbers mean equal
bits for every value of every leaf; a NaN counts as one value (see docs/guide/proof.md).

A value has granules of 16 bits. A *code* names one granule: four times the number of a row, plus
which granule of it. Moving bits moves codes, so that packing needs no rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinstep.replay.dtypes import Array

PLAIN = -1
"""The code of a granule whose bits derive from no leaf."""

LEAF, CONST, JOIN, PART = "leaf", "const", "join", "part"


@dataclass(frozen=True)
class Row:
    """One expression.

    Attributes:
        op: `leaf`, `const`, `join` (of granules, lowest first), `part` (a granule of a value),
            `if` (predicate, then, else), a predicate's `and`, `or`, `xor`, `not`, or an opcode
            of PTX with its rounding written out.
        args: earlier rows; bits of a constant; for a leaf its number.
        granules: of 16 bits; 0 for a predicate.
        site: the instruction or line that first made it.
    """

    op: str
    args: tuple[int, ...]
    granules: int
    site: str


@dataclass
class Sets:
    """Sets of rows, a bit for each member.

    Attributes:
        place: which bit a member is.
        bits: of the set that a row stands for, by its number.
        rows: the row of each set.
    """

    place: dict[int, int] = field(default_factory=dict)
    bits: dict[int, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)

    def of(self, member: int) -> int:
        """The set of one member."""
        return 1 << self.place.setdefault(member, len(self.place))


Simplify = Callable[["Table", str, tuple[int, ...], int, str], int | None]


@dataclass
class Table:
    """The expressions of one comparison.

    Attributes:
        simplified: gives the number of an expression that is not in normal form.
        rows: by number.
        leaves: what the leaves are called, by their number.
        sets: what rows of sets stand for.
    """

    simplified: Simplify
    rows: list[Row] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    sets: Sets = field(default_factory=Sets)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)
    _joins: set[int] = field(default_factory=set)

    def row(self, op: str, args: Sequence[int], granules: int, site: str = "") -> int:
        """The number of an expression, in normal form."""
        key = (op, granules, *args)
        found = self._known.get(key)
        if found is None:
            found = self.simplified(self, op, tuple(args), granules, site)
            if found is None:
                found = len(self.rows)
                self.rows.append(Row(op, tuple(args), granules, site))
                if op == JOIN:
                    self._joins.add(found)
            self._known[key] = found
        return found

    def const(self, bits: int, granules: int) -> int:
        """The number of a constant; a predicate has no granules."""
        return self.row(CONST, (int(bits),), granules)

    def leaf(self, name: str, granules: int) -> int:
        """A new leaf."""
        self.leaves.append(name)
        return self.row(LEAF, (len(self.leaves) - 1,), granules)

    def constant_bits(self, number: int) -> int | None:
        """The bits of a constant; None for anything else."""
        row = self.rows[number]
        return row.args[0] if row.op == CONST else None

    # --- vectors ---------------------------------------------------------------------------

    def each(
        self, op: str, columns: Sequence[Array], granules: int, site: str | Callable[[], str] = ""
    ) -> Array:
        """The numbers of one operation on vectors of numbers; -1 marks a lane that is left out."""
        shape = np.broadcast_shapes(*(column.shape for column in columns))
        flat = [np.broadcast_to(column, shape).reshape(-1).tolist() for column in columns]
        known, place, found = self._known, "", []
        for args in zip(*flat, strict=True):
            if args[0] < 0:
                found.append(-1)
                continue
            number = known.get((op, granules, *args))
            if number is None:
                place = place or (site if isinstance(site, str) else site())
                number = self.row(op, args, granules, place)
            found.append(number)
        return np.array(found, np.int64).reshape(shape)

    def consts(self, bits: Array, granules: int) -> Array:
        """The numbers of constants, from unsigned bits."""
        unique, inverse = np.unique(bits, return_inverse=True)
        numbers = np.array([self.const(b, granules) for b in unique.tolist()], np.int64)
        return numbers[inverse].reshape(bits.shape)

    def joined(self, codes: Iterable[int]) -> int:
        """The value made of granules, lowest first."""
        parts = tuple(codes)
        first = parts[0] >> 2
        count = self.rows[first].granules
        if count == len(parts) and parts == tuple(4 * first + i for i in range(count)):
            return first
        return self.row(JOIN, tuple(self.granule(code) for code in parts), len(parts))

    def granule(self, code: int) -> int:
        """The value of one granule, as a row of its own."""
        number, part = code >> 2, code & 3
        row = self.rows[number]
        if row.granules == 1:
            return number
        if row.op == CONST:
            return self.const(row.args[0] >> 16 * part & 0xFFFF, 1)
        if row.op == JOIN:
            return row.args[part]
        return self.row(PART, (number, self.const(part, 1)), 1)

    def values(self, codes: Array) -> Array:
        """The numbers of values whose granules lie along the last axis, none of them plain."""
        g = codes.shape[-1]
        first = codes[..., 0] >> 2
        whole = np.all(codes == (4 * first)[..., None] + np.arange(g), axis=-1)
        flat, numbers = codes.reshape(-1, g), first.reshape(-1).copy()
        sizes = np.array([self.rows[n].granules for n in numbers.tolist()], np.int64)
        odd = ~(whole.reshape(-1) & (sizes == g))
        for at in np.flatnonzero(odd).tolist():
            numbers[at] = self.joined(flat[at].tolist())
        return numbers.reshape(first.shape)

    def codes(self, numbers: Array, g: int) -> Array:
        """The granules of values, along a new last axis; plain where the number is -1."""
        whole = 4 * numbers[..., None] + np.arange(g)
        result = np.where(numbers[..., None] < 0, PLAIN, whole)
        each = numbers.reshape(-1).tolist()
        if not self._joins.isdisjoint(each):
            flat = result.reshape(-1, g)
            for at, number in enumerate(each):
                if number in self._joins:
                    flat[at] = [4 * part for part in self.rows[number].args]
        return result
