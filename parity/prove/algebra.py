"""Expressions read as real numbers: what they compute when nothing is rounded.

A walk gives each expression a value of an algebra: numbers modulo a prime (`reals`), or float64
(`doubles`). Conversions between float formats are identities there. Integers, and bits that are
looked at as such, are no real numbers: an expression of them is known by its own number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

import numpy as np

from twinstep.parity.prove.terms import FORMATS
from twinstep.replay.names.evaluate import needed
from twinstep.replay.names.table import Row, Table

V = TypeVar("V")
P = TypeVar("P")
GRANULES = {"f16": 1, "bf16": 1, "f32": 2, "f64": 4}
SIGN = {1: 0x8000, 2: 0x8000_0000, 4: 0x8000_0000_0000_0000}
WIDEST = {2: "f32", 4: "f64"}
WHOLE = 1 << 41
"""Below it a constant exponent of a power is read as that many factors."""
ROUNDED = frozenset(("rni", "rzi", "rmi", "rpi", "sat", "relu"))
"""Modifiers that change a real number."""


class NotReal(Exception):
    """An expression has no reading as a real number."""


class Algebra(Protocol[V, P]):
    """Operations on values V, with truth values P."""

    def constant(self, value: Fraction) -> V:
        """A rational number."""

    def leaf(self, number: int, kind: str) -> V:
        """An element of a tensor; also an expression that is known by its number alone."""

    def add(self, a: V, b: V) -> V:
        """A sum."""

    def negative(self, a: V) -> V:
        """The negative."""

    def multiply(self, a: V, b: V) -> V:
        """A product."""

    def divide(self, a: V, b: V) -> V:
        """A quotient."""

    def root(self, a: V) -> V:
        """The square root."""

    def function(self, name: str, args: Sequence[V]) -> V:
        """A function of which nothing is known."""

    def less(self, a: V, b: V) -> P:
        """True where a is below b."""

    def equal(self, a: V, b: V, rows: tuple[int, int]) -> P:
        """True where both are one number; `rows` are their expressions."""

    def truth(self, number: int) -> P:
        """A predicate that is known by its number alone."""

    def known(self, value: bool) -> P:
        """A constant truth value."""

    def invert(self, a: P) -> P:
        """Negation."""

    def both(self, a: P, b: P) -> P:
        """Conjunction."""

    def choose(self, condition: P, a: Callable[[], V], b: Callable[[], V]) -> V:
        """One of two values; they may be formed when they are wanted."""


def rational(bits: int, kind: str) -> Fraction:
    """A constant of a float format.

    Raises:
        NotReal: an infinity or a NaN.
    """
    if kind == "bf16":
        bits, kind = bits << 16, "f32"
    size = 2 * GRANULES[kind]
    value = float(np.array(bits, f"u{size}").view(f"f{size}"))
    if not np.isfinite(value):
        raise NotReal("an infinity or a NaN")
    return Fraction(value)


class Walk(Generic[V, P]):
    """Values of expressions in an algebra, each formed once.

    Args:
        table: that holds the expressions.
        algebra: of the values.
        followed: tests for NaN or infinities that are conditions like others; the rest fail.
    """

    def __init__(
        self, table: Table, algebra: Algebra[V, P], followed: frozenset[int] = frozenset()
    ) -> None:
        self.table, self.algebra, self.followed = table, algebra, followed
        self._values: dict[tuple[int, str], V] = {}
        self._truths: dict[int, P] = {}

    def value(self, number: int, kind: str) -> V:
        """The value of an expression that is read in a float format.

        Raises:
            NotReal: it is no real number.
        """
        key = (number, kind)
        if key not in self._values:
            self._values[key] = self._value(number, self.table.rows[number], kind)
        return self._values[key]

    def _value(self, number: int, row: Row, kind: str) -> V:
        own = self.algebra
        if row.op == "const":
            return own.constant(rational(row.args[0], kind))
        if row.op == "if":
            return own.choose(
                self.truth(row.args[0]),
                lambda: self.value(row.args[1], kind),
                lambda: self.value(row.args[2], kind),
            )
        if row.op == "join" and kind == "f32" and self.table.constant_bits(row.args[0]) == 0:
            return self.value(row.args[1], "bf16")
        masked = self._masked(row, kind)
        if masked is not None:
            return masked
        name, *middle, last = [*row.op.split("."), ""][: max(2, row.op.count(".") + 1)]
        if last not in FORMATS or ROUNDED.intersection(middle):
            return own.leaf(number, kind)
        if name == "cvt":
            target = middle[-1]
            inside = target == kind and last in FORMATS
            return self.value(row.args[0], last) if inside else own.leaf(number, kind)
        if last != kind:
            return own.leaf(number, kind)
        if name == "pow" and (exponent := self._whole(row.args[1])) is not None:
            return self._power(self.value(row.args[0], kind), exponent)
        args = [self.value(n, kind) for n in row.args]
        return self._operation(name, args)

    def _whole(self, number: int) -> int | None:
        """A constant float64 that is a whole number."""
        bits = self.table.constant_bits(number)
        if bits is None or self.table.rows[number].granules != GRANULES["f64"]:
            return None
        value = rational(bits, "f64")
        return int(value) if value.denominator == 1 and abs(value) < WHOLE else None

    def _power(self, value: V, exponent: int) -> V:
        own, found = self.algebra, self.algebra.constant(Fraction(1))
        for bit in f"{abs(exponent):b}":
            found = own.multiply(found, found)
            found = own.multiply(found, value) if bit == "1" else found
        return found if exponent >= 0 else own.divide(own.constant(Fraction(1)), found)

    def _masked(self, row: Row, kind: str) -> V | None:
        """Absolute value and negation, which have the form of masks."""
        if not row.op.startswith(("and.b", "xor.b")) or row.granules != GRANULES[kind]:
            return None
        mask = SIGN[row.granules] - (1 if row.op[0] == "a" else 0)
        rest = [n for n in row.args if self.table.constant_bits(n) != mask]
        if len(rest) != 1:
            return None
        value = self.value(rest[0], kind)
        return self._size(value) if row.op[0] == "a" else self.algebra.negative(value)

    def _size(self, value: V) -> V:
        own = self.algebra
        below = own.less(value, own.constant(Fraction(0)))
        return own.choose(below, lambda: own.negative(value), lambda: value)

    def _operation(self, name: str, args: list[V]) -> V:
        own = self.algebra
        match name, args:
            case "add", (a, b):
                return own.add(a, b)
            case "sub", (a, b):
                return own.add(a, own.negative(b))
            case "mul", (a, b):
                return own.multiply(a, b)
            case "div", (a, b):
                return own.divide(a, b)
            case "fma", (a, b, c):
                return own.add(own.multiply(a, b), c)
            case "sqrt", (a,):
                return own.root(a)
            case "rsqrt", (a,):
                return own.divide(own.constant(Fraction(1)), own.root(a))
            case "rcp", (a,):
                return own.divide(own.constant(Fraction(1)), a)
            case "neg", (a,):
                return own.negative(a)
            case "abs", (a,):
                return self._size(a)
            case (("min" | "max"), (a, b)):
                pair = (a, b) if name == "min" else (b, a)
                return own.choose(own.less(a, b), lambda: pair[0], lambda: pair[1])
        return own.function(name, args)

    # --- predicates ------------------------------------------------------------------------

    def truth(self, number: int) -> P:
        """The value of a predicate."""
        if number not in self._truths:
            self._truths[number] = self._truth(number, self.table.rows[number])
        return self._truths[number]

    def _truth(self, number: int, row: Row) -> P:
        own = self.algebra
        if number in self.followed:
            return own.truth(number)
        if row.op == "const":
            return own.known(bool(row.args[0]))
        if row.op == "not":
            return own.invert(self.truth(row.args[0]))
        if row.op in ("and", "or"):
            turn = own.invert if row.op == "or" else (lambda p: p)
            found = own.known(True)
            for n in row.args:
                found = own.both(found, turn(self.truth(n)))
            return turn(found)
        name, _, kind = row.op.partition(".")
        kind = kind.split(".")[-1]
        if kind not in FORMATS or name not in ("lt", "le", "eq"):
            return own.truth(number)
        if row.args[0] == row.args[1]:
            return own.known(name != "lt")
        infinite = [infinite_sign(self.table, n, kind) for n in row.args]
        if any(infinite):
            return own.known(name != "eq" and infinite[1] - infinite[0] > 0)
        a, b = (self.value(n, kind) for n in row.args)
        if name == "eq":
            return own.equal(a, b, (row.args[0], row.args[1]))
        return own.less(a, b)


def infinite_sign(table: Table, number: int, kind: str) -> int:
    """1 or -1 for an infinite constant, else 0."""
    bits = table.constant_bits(number)
    if bits is None:
        return 0
    exponent, mantissa = FORMATS[kind]
    size = bits & (SIGN[GRANULES[kind]] - 1)
    if size != ((1 << exponent) - 1) << (mantissa - 1):
        return 0
    return -1 if bits != size else 1


def rare_tests(table: Table, a: int, b: int) -> frozenset[int]:
    """Tests for NaN and infinities that only one of two expressions makes."""
    one, two = (set(needed(table, [number])) for number in (a, b))
    return frozenset(number for number in one ^ two if _is_rare(table, table.rows[number]))


def _is_rare(table: Table, row: Row) -> bool:
    name, _, kind = row.op.partition(".")
    kind = kind.split(".")[-1]
    if row.granules or kind not in FORMATS or name not in ("lt", "le", "eq"):
        return False
    same = name == "eq" and row.args[0] == row.args[1]
    return same or any(infinite_sign(table, n, kind) for n in row.args)
