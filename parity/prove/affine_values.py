"""Affine integers of all threads: a + b p + c s, an address in a tensor, or not known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinstep.replay.dtypes import Array

KNOWN, SAME, ANY = 0, 1, 2
"""A number; data that is one value in all threads; anything else."""


@dataclass
class Value:
    """Integers of all threads.

    Attributes:
        a: what is constant.
        b: of the program.
        c: of the excess.
        tag: tensor that it is an address in, by number; -1 if none.
        state: `KNOWN`, `SAME` or `ANY`.
    """

    a: Array
    b: Array
    c: Array
    tag: Array
    state: Array


def number(a: object, b: int = 0, c: int = 0, tag: int = -1) -> Value:
    """A value that is known."""
    b_, c_, own, state = (np.array(x, np.int64) for x in (b, c, tag, KNOWN))
    return Value(np.asarray(a, np.int64), b_, c_, own, state)


def data(state: int | Array = ANY) -> Value:
    """A value that is not known."""
    found = number(0)
    found.state = np.asarray(state, np.int64)
    return found


@dataclass
class Bounds:
    """The domain: 0 <= p, 0 <= s, and chunk p + s + 1 <= most.

    Attributes:
        chunk: elements of one program.
        most: the largest size.
    """

    chunk: int
    most: int

    @property
    def programs(self) -> int:
        """The largest p."""
        return (self.most - 1) // self.chunk

    def low(self, v: Value) -> Array:
        """Least value: at a corner of the domain."""
        return np.asarray(
            v.a + np.minimum(0, np.minimum(v.b * self.programs, v.c * (self.most - 1)))
        )

    def high(self, v: Value) -> Array:
        """Largest value."""
        return np.asarray(
            v.a + np.maximum(0, np.maximum(v.b * self.programs, v.c * (self.most - 1)))
        )


def is_plain(v: Value) -> Array:
    """True for a number that neither program nor size changes."""
    return np.asarray((v.b == 0) & (v.c == 0) & (v.tag < 0))


def total(a: Value, b: Value, sign: int) -> Value:
    """A sum or a difference; the tag is -2 where it is no address and no number."""
    if sign > 0:
        tag = np.where(b.tag < 0, a.tag, np.where(a.tag < 0, b.tag, -2))
    else:
        tag = np.where(b.tag < 0, a.tag, np.where(a.tag == b.tag, -1, -2))
    return Value(a.a + sign * b.a, a.b + sign * b.b, a.c + sign * b.c, tag, a.state)


def product(a: Value, b: Value) -> Value:
    """A product, one factor of which is a plain number."""
    one, other = (a, b) if is_plain(b).all() else (b, a)
    odd = ~is_plain(other) | (one.tag >= 0)
    return Value(
        one.a * other.a, one.b * other.a, one.c * other.a, np.where(odd, -2, -1), one.state
    )


def chosen(flags: Array, a: Value, b: Value) -> Value:
    """The first value where a flag holds, else the second."""
    pairs = ((a.a, b.a), (a.b, b.b), (a.c, b.c), (a.tag, b.tag), (a.state, b.state))
    a_, b_, c_, tag, state = (np.where(flags, x, y) for x, y in pairs)
    return Value(a_, b_, c_, tag, state)


def merged(mask: Array, new: Value, old: Value) -> Value:
    """The new value in some threads."""
    pairs = ((new.a, old.a), (new.b, old.b), (new.c, old.c), (new.tag, old.tag))
    a, b, c, tag, state = (
        x if x.ndim == 0 and y.ndim == 0 and x == y else np.where(mask, x, y)
        for x, y in (*pairs, (new.state, old.state))
    )
    return Value(a, b, c, tag, state)


def logic(name: str, args: list[Value]) -> Value | None:
    """A copy, negation, conjunction or disjunction of predicates; None for anything else."""
    first = args[0]
    if name in ("mov", "not"):
        flags = 1 - first.a if name == "not" else first.a
        return Value(flags, first.b, first.c, first.tag, first.state)
    if name not in ("and", "or") or len(args) != 2:
        return None
    absorbing = 0 if name == "and" else 1
    settled: Array = np.zeros((), np.bool_)
    for v in args:
        settled = settled | ((v.state == KNOWN) & (v.a == absorbing))
    second = args[1]
    both = first.a & second.a if name == "and" else first.a | second.a
    state = np.where(settled, KNOWN, np.maximum(first.state, second.state))
    return Value(np.where(settled, absorbing, both), first.b, first.c, first.tag, state)
