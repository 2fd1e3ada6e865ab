"""Operands for an instruction: the patterns at the edges of its types, and random bits."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from twinstep.replay.dtypes import Array, width
from twinstep.replay.spec.floats import FORMATS, first_special

PATTERNS = 1 << 16


@cache
def edges(kind: str) -> tuple[int, ...]:
    """Bit patterns where formats and algorithms change their mind."""
    if kind == "pred":
        return 0, 1
    scalar = kind.removesuffix("x2")
    if scalar != kind:
        bits, one = 8 * width(kind) // 2, edges(scalar)
        return tuple(one[-i] << bits | low for i, low in enumerate(one))
    if kind not in FORMATS:
        bits = 8 * width(kind)
        near = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 255]
        near += [(1 << (bits - 1)) + d for d in (-2, -1, 0, 1)]
        return tuple(sorted({x % (1 << bits) for x in near + [-x - 1 for x in near]}))
    exponent, fraction = FORMATS[kind]
    infinity = first_special(kind)
    one_ = ((1 << (exponent - 1)) - 1) << fraction
    smallest = 1 << fraction
    ulp = one_ - (fraction << fraction)
    plain = [0, 1, 2, smallest - 1, smallest, smallest + 1, infinity - 1, infinity, infinity + 1]
    plain += [one_, one_ + 1, one_ - 1, one_ + smallest, one_ | 1 << (fraction - 1), ulp]
    plain += [max(ulp - smallest, 1), ulp + 1, infinity | 1 << (fraction - 1)]
    sign = 1 << (exponent + fraction)
    return tuple(sorted({x | s for x in plain for s in (0, sign)}))


def sampled(kinds: Sequence[str], seed: str, count: int) -> list[Array]:
    """Edge combinations (thinned to half of `count`) and random bits: one array per source."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    combos = list(itertools.product(*(edges(kind) for kind in kinds[:3])))
    most = max(count // 2, 1)
    if len(combos) > most:
        combos = [combos[i] for i in rng.choice(len(combos), most, replace=False)]
    columns = []
    for index, kind in enumerate(kinds):
        most_ = 2 if kind == "pred" else 256
        given = [c[index] if index < 3 else int(rng.integers(0, most_)) for c in combos]
        dtype = np.dtype(f"u{4 if kind == 'pred' else max(width(kind), 2)}")
        columns.append(np.concatenate([np.array(given, dtype), _random(kind, rng, count - most)]))
    return columns


def _random(kind: str, rng: np.random.Generator, count: int) -> Array:
    if kind == "pred":
        return rng.integers(0, 2, count, dtype=np.uint32)
    dtype = np.dtype(f"u{max(width(kind), 2)}")
    random: Array = rng.integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)
    if kind in FORMATS:  # half of them with near exponents, so that sums interact
        exponent, fraction = FORMATS[kind]
        near = random[: count // 2] % (1 << (fraction + 3))
        random[: count // 2] = near + (((1 << (exponent - 1)) - 4) << fraction)
    return random


def narrow(kind: str) -> bool:
    """True if a source has at most 16 bits, or is a pair of 16."""
    return kind != "pred" and (width(kind) <= 2 or (kind.endswith("x2") and width(kind) == 4))


def exhaustive(kinds: Sequence[str], seed: str) -> list[Array] | None:
    """65,536 operands in which each narrow source takes every pattern once.

    The first does so in order, others and the upper halves of pairs in orders of their own; wider
    sources are edges and random bits. None where no source is narrow.
    """
    if not any(map(narrow, kinds)):
        return None
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return [
        _every(kind, rng, shuffled=i > 0) if narrow(kind) else _mixed(kind, rng)
        for i, kind in enumerate(kinds)
    ]


def _every(kind: str, rng: np.random.Generator, shuffled: bool) -> Array:
    dtype = np.dtype(f"u{max(width(kind), 2)}")
    low = np.arange(PATTERNS, dtype=dtype)
    high = rng.permutation(low)
    low = rng.permutation(low) if shuffled else low
    return low if width(kind) < 4 else np.asarray(high << dtype.type(16) | low)


def _mixed(kind: str, rng: np.random.Generator) -> Array:
    random = rng.permutation(_random(kind, rng, PATTERNS))
    edge = rng.choice(np.array(edges(kind), random.dtype), PATTERNS)
    return np.where(rng.integers(0, 2, PATTERNS) == 0, random, edge)
