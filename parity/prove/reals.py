"""Equality over the real numbers, by exact arithmetic modulo large primes at random points.

Two rational expressions that differ agree modulo a prime p at a random point with a probability of
at most their degree over p (Schwartz, Zippel). Division is exact there. The primes are 3 modulo 4,
so that x to the power of (p + 1) / 4 is a square root of every square x, and a product's root is
the product of the roots; points where a radicand is no square are left out, as a negative one is.
Other functions are functions of the values of their operands at all points, and nothing else.

Conditions are followed on both sides. Where one holds, points are kept at which the difference of
its sides is a square, or a leaf has the value that it is compared with. Nothing is rounded, and
there are no infinities and no NaN; but a test for them that one expression alone makes is a
condition too, so that a kernel that puts a number in the place of a NaN is told apart.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from twinstep.parity.prove.algebra import NotReal, Walk, rare_tests, rational
from twinstep.replay.names.table import Table

PRIMES = (
    1326472952493355839605587451117469247199,
    1261880113259584467896260168171993593119,
    754705320184772082380067296402689719479,
)
"""Drawn at random once, above 2^129, among those that are 7 modulo 8 and modulo which the primes up
to 31 are squares, so that a product of them is positive here as well."""
POINTS = 96
MOST_POINTS = 6144
ENOUGH = 24
"""Points that must be left."""
CONDITIONS = 8
"""Most conditions that are followed."""
Vector = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Result of a comparison.

    Attributes:
        equal: None where it could not be told.
        bits: the chance that a difference was missed is below 2 to the power of minus this.
        why: what could not be followed.
        side: outcomes of tests of bits, NaN and infinities with which the two differ.
    """

    equal: bool | None
    bits: int = 0
    why: str = ""
    side: tuple[tuple[int, bool], ...] = ()


class _Fork(Exception):
    """A condition whose side is not chosen yet."""


@dataclass
class _Value:
    at: Vector
    degree: int
    exact: Fraction | None = None


@dataclass
class Field:
    """Numbers modulo primes at a row of points, on one side of each condition.

    Attributes:
        count: points.
        sides: chosen sides of conditions, by what they are about.
        pinned: leaves that are equal to a constant on this side.
    """

    count: int
    sides: dict[object, bool]
    pinned: dict[int, Fraction]
    out: set[int] = field(default_factory=set)
    roots: int = 0
    new: object = None

    def prime(self, point: int) -> int:
        """The prime of a point."""
        return PRIMES[point % len(PRIMES)]

    def _each(self, function: Callable[[int, int], int], degree: int) -> _Value:
        values = tuple(function(i, self.prime(i)) for i in range(self.count))
        return _Value(values, degree)

    def _random(self, *key: object) -> _Value:
        seed = hashlib.blake2b(repr(key).encode(), digest_size=32).digest()

        def draw(point: int, p: int) -> int:
            mixed = hashlib.blake2b(seed + point.to_bytes(4, "little"), digest_size=40).digest()
            return int.from_bytes(mixed, "little") % p

        return self._each(draw, 1)

    def constant(self, value: Fraction) -> _Value:
        """A rational number."""
        found = self._each(lambda _, p: value.numerator * pow(value.denominator, -1, p) % p, 0)
        found.exact = value
        return found

    def leaf(self, number: int, kind: str) -> _Value:
        """A random number, or the constant that the leaf is equal to here."""
        if number in self.pinned:
            return self.constant(self.pinned[number])
        return self._random("leaf", number, kind)

    def add(self, a: _Value, b: _Value) -> _Value:
        """A sum."""
        if a.exact is not None and b.exact is not None:
            return self.constant(a.exact + b.exact)
        return self._each(lambda i, p: (a.at[i] + b.at[i]) % p, a.degree + b.degree)

    def negative(self, a: _Value) -> _Value:
        """The negative."""
        if a.exact is not None:
            return self.constant(-a.exact)
        return self._each(lambda i, p: -a.at[i] % p, a.degree)

    def multiply(self, a: _Value, b: _Value) -> _Value:
        """A product."""
        if a.exact is not None and b.exact is not None:
            return self.constant(a.exact * b.exact)
        return self._each(lambda i, p: a.at[i] * b.at[i] % p, a.degree + b.degree)

    def divide(self, a: _Value, b: _Value) -> _Value:
        """A quotient; points with a divisor of 0 are left out."""
        if a.exact is not None and b.exact:
            return self.constant(a.exact / b.exact)
        self.out |= {i for i, x in enumerate(b.at) if not x}
        return self._each(
            lambda i, p: a.at[i] * pow(b.at[i], -1, p) % p if b.at[i] else 0, a.degree + b.degree
        )

    def root(self, a: _Value) -> _Value:
        """The square root; points where there is none are left out."""
        found = self._each(lambda i, p: pow(a.at[i], (p + 1) // 4, p), a.degree)
        self.out |= {i for i, r in enumerate(found.at) if (r * r - a.at[i]) % self.prime(i)}
        self.roots += 1
        return found

    def function(self, name: str, args: Sequence[_Value]) -> _Value:
        """A random function."""
        return self._random(name, *(a.at[:POINTS] for a in args))

    # --- conditions ------------------------------------------------------------------------

    def _side(self, key: object) -> bool:
        if key not in self.sides:
            self.new = key
            raise _Fork
        return self.sides[key]

    def less(self, a: _Value, b: _Value) -> bool:
        """The chosen side of a < b, the opposite of that of b < a."""
        gap = self.add(b, self.negative(a))
        if gap.exact is not None or not any(gap.at):
            return bool(gap.exact and gap.exact > 0)
        other = self.negative(gap)
        known = min(gap.at[:POINTS], other.at[:POINTS])
        holds = self._side(("less", known)) == (known == gap.at[:POINTS])
        side = gap if holds else other
        self.out |= {
            i for i, x in enumerate(side.at) if pow(x, (self.prime(i) - 1) // 2, self.prime(i)) != 1
        }
        return holds

    def equal(self, a: _Value, b: _Value, rows: tuple[int, int]) -> bool:
        """The chosen side of a = b; a leaf that is equal to a constant has its value."""
        gap = self.add(a, self.negative(b))
        if gap.exact is not None or not any(gap.at):
            return not gap.exact
        return self._side(("equal", rows))

    def truth(self, number: int) -> bool:
        """The chosen side."""
        return self._side(("truth", number))

    def known(self, value: bool) -> bool:
        """Itself."""
        return value

    def invert(self, a: bool) -> bool:
        """Negation."""
        return not a

    def both(self, a: bool, b: bool) -> bool:
        """Conjunction."""
        return a and b

    def choose(self, condition: bool, a: Callable[[], _Value], b: Callable[[], _Value]) -> _Value:
        """The value of the chosen side."""
        return a() if condition else b()


def equal(table: Table, a: int, b: int, kind: str, path: Sequence[tuple[int, bool]] = ()) -> Answer:
    """Tell whether two expressions are one function of real numbers.

    Args:
        table: that holds them.
        a: number of the first.
        b: number of the second.
        kind: float format that both are read in.
        path: conditions that hold; a leaf that equals a constant there has its value.
    """
    pinned: dict[int, Fraction] = {}
    for number, outcome in path:
        row = table.rows[number]
        if outcome and row.op.startswith("eq."):
            _pin(table, (row.args[0], row.args[1]), pinned)
    worst = math.inf
    sides: list[tuple[dict[object, bool], dict[int, Fraction]]] = [({}, pinned)]
    done, followed = 0, rare_tests(table, a, b)
    with _deep():
        while sides:
            chosen, fixed = sides.pop()
            try:
                same, bits, new = _on_side(table, (a, b), kind, chosen, fixed, followed)
            except NotReal as error:
                return Answer(None, why=str(error))
            if new is not None:
                if len(chosen) >= CONDITIONS:
                    return Answer(None, why=f"more than {CONDITIONS} conditions")
                for side in (False, True):
                    held = dict(fixed)
                    if side and isinstance(new, tuple) and new[0] == "equal":
                        _pin(table, new[1], held)
                    sides.append(({**chosen, new: side}, held))
            elif same is None:
                return Answer(None, why="too few points under the conditions")
            elif not same:
                known = ((key, o) for key, o in chosen.items() if isinstance(key, tuple))
                return Answer(False, side=tuple((k[1], o) for k, o in known if k[0] == "truth"))
            else:
                worst, done = min(worst, bits), done + 1
    return Answer(True, int(worst) - max(done - 1, 0).bit_length())


def _on_side(
    table: Table,
    pair: tuple[int, int],
    kind: str,
    chosen: dict[object, bool],
    fixed: dict[int, Fraction],
    followed: frozenset[int],
) -> tuple[bool | None, float, object]:
    """Whether both agree on one side of each condition, how surely, and a condition to choose."""
    count = POINTS
    while True:
        # Conditions are known by values at the first points: those are among any larger number.
        own = Field(count, chosen, fixed)
        walk: Walk[_Value, bool] = Walk(table, own, followed)
        try:
            a, b = (walk.value(n, kind) for n in pair)
        except _Fork:
            return None, 0.0, own.new
        left = [i for i in range(count) if i not in own.out]
        if any(a.at[i] != b.at[i] for i in left):
            return False, 0.0, None
        if len(left) >= ENOUGH:
            degree = max(a.degree + b.degree, 1) << own.roots
            return True, math.log2(min(PRIMES)) - math.log2(degree), None
        if count >= MOST_POINTS:
            # A side without any point has contradictory conditions.
            return (None if left else True), math.inf, None
        count *= 4


def _pin(table: Table, rows: tuple[int, int], pinned: dict[int, Fraction]) -> None:
    """Give a leaf the value of the constant that it is equal to."""
    for leaf, other in (rows, rows[::-1]):
        bits, row = table.constant_bits(other), table.rows[leaf]
        wide = {"cvt.f64.f32": 2, "cvt.rn.f32.f64": 4}.get(row.op)
        if wide is not None:
            leaf, row = row.args[0], table.rows[row.args[0]]
        kind = {2: "f32", 4: "f64"}.get(table.rows[other].granules)
        if row.op == "leaf" and bits is not None and kind is not None:
            pinned[leaf] = rational(bits, kind)


@contextmanager
def _deep() -> Iterator[None]:
    """Let a walk go down long sums."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 50_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
