"""Values for which two formulas of real numbers are far apart, found in float64.

A bounded kernel may round elsewhere, so that unequal bits show nothing. What shows a wrong formula
is a distance that no rounding explains: leaves are drawn, both formulas are evaluated with every
operation in float64, and the largest distances come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from twinstep.parity.prove.algebra import NotReal, Walk
from twinstep.parity.prove.search import drawn
from twinstep.replay.dtypes import Array
from twinstep.replay.names.evaluate import leaves_of
from twinstep.replay.names.table import Table

DRAWN = 2048
GROSS = 1e-4
"""Relative distance from which two formulas are suspected; a run decides."""
SHOWN = 6
FUNCTIONS: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
    "pow": np.power,
}


@dataclass
class Doubles:
    """Float64 in every lane.

    Attributes:
        leaves: bits of each leaf.
    """

    leaves: Mapping[int, Array]

    def constant(self, value: Fraction) -> Array:
        """A number."""
        return np.array([float(value)])

    def leaf(self, number: int, kind: str) -> Array:
        """The value of a leaf.

        Raises:
            NotReal: it is no leaf, but an expression of integers.
        """
        if number not in self.leaves:
            raise NotReal("integers")
        bits = self.leaves[number].reshape(-1)
        if kind == "bf16":
            bits, kind = bits.astype(np.uint32) << 16, "f32"
        return np.asarray(bits.view(f"f{bits.dtype.itemsize}").astype(np.float64))

    def add(self, a: Array, b: Array) -> Array:
        """A sum."""
        return np.asarray(a + b)

    def negative(self, a: Array) -> Array:
        """The negative."""
        return np.asarray(-a)

    def multiply(self, a: Array, b: Array) -> Array:
        """A product."""
        return np.asarray(a * b)

    def divide(self, a: Array, b: Array) -> Array:
        """A quotient."""
        return np.asarray(a / b)

    def root(self, a: Array) -> Array:
        """A square root."""
        return np.asarray(np.sqrt(a))

    def function(self, name: str, args: Sequence[Array]) -> Array:
        """A function of numpy.

        Raises:
            NotReal: numpy has none of this name.
        """
        if name not in FUNCTIONS:
            raise NotReal(name)
        return np.asarray(FUNCTIONS[name](*args))

    def less(self, a: Array, b: Array) -> Array:
        """A comparison."""
        return np.asarray(a < b)

    def equal(self, a: Array, b: Array, rows: tuple[int, int]) -> Array:
        """A comparison."""
        return np.asarray(a == b)

    def truth(self, number: int) -> Array:
        """None.

        Raises:
            NotReal: always.
        """
        raise NotReal("integers")

    def known(self, value: bool) -> Array:
        """A constant."""
        return np.array([value])

    def invert(self, a: Array) -> Array:
        """Negation."""
        return np.asarray(~a)

    def both(self, a: Array, b: Array) -> Array:
        """Conjunction."""
        return np.asarray(a & b)

    def choose(self, condition: Array, a: Callable[[], Array], b: Callable[[], Array]) -> Array:
        """Both values, and one of them in each lane."""
        return np.where(condition, a(), b())


def far_apart(
    table: Table,
    a: int,
    b: int,
    kind: str,
    path: Sequence[tuple[int, bool]],
    keep: Mapping[int, int],
    ranges: Mapping[int, Array],
) -> Iterator[dict[int, int]]:
    """Bits of leaves for which two formulas are far apart, the farthest first.

    Args:
        table: that holds them.
        a: number of the first.
        b: number of the second.
        kind: float format that both are read in.
        path: outcomes of conditions.
        keep: bits of leaves in a run; most assignments leave most leaves at these.
        ranges: bits that some leaves are drawn from, controls mostly.
    """
    numbers = [a, b, *(number for number, _ in path)]
    found: list[tuple[float, dict[int, int]]] = []
    for seed in range(2):
        bits = drawn(table, numbers, keep, seed, DRAWN)
        rng = np.random.default_rng(seed)
        for leaf in leaves_of(table, numbers):
            if leaf in ranges:
                bits[leaf] = rng.choice(ranges[leaf], DRAWN).reshape(1, -1)
        for distance, at in _ranked(table, (a, b), kind, path, bits):
            found.append((distance, {n: int(v.flat[at % v.size]) for n, v in bits.items()}))
    found.sort(key=lambda row: -row[0])
    return (values for _, values in found[:SHOWN])


def _ranked(
    table: Table,
    pair: tuple[int, int],
    kind: str,
    path: Sequence[tuple[int, bool]],
    bits: Mapping[int, Array],
) -> Iterator[tuple[float, int]]:
    walk: Walk[Array, Array] = Walk(table, Doubles(bits))
    with np.errstate(all="ignore"):
        try:
            x, y = (walk.value(n, kind) for n in pair)
            held = np.ones(DRAWN, np.bool_)
            for number, outcome in path:
                held = held & (walk.truth(number) == outcome)
        except NotReal:
            return
        x, y = np.broadcast_arrays(x, y)
        size = np.maximum(np.abs(x), np.abs(y))
        # Away from the ends of every format, where rounding is relative.
        usual = held & (size > 1e-4) & (size < 1e4)
        distance = np.where(usual, np.abs(x - y) / size, 0.0)
    for at in np.argsort(-distance)[:SHOWN].tolist():
        if distance[at] > GROSS:
            yield float(distance[at]), at
