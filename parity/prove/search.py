"""Values that satisfy conditions, or tell two expressions apart: drawn, with edges and thresholds.

Leaves take numbers of every magnitude, the special numbers of their format, and the constants that
stand in the expressions with their neighbours, which is where conditions turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.names.evaluate import evaluate, leaves_of, needed
from twinstep.replay.names.table import Table

DRAWN = 1 << 12
NOTHING: Mapping[int, int] = {}
NOWHERE: Mapping[int, Array] = {}
LEAVES = 1 << 18
"""Most values of leaves in one draw, and so of few leaves many."""
FLOAT = {1: np.float16, 2: np.float32, 4: np.float64}
MANTISSA = {1: (10, 7), 2: (23,), 4: (52,)}


@dataclass(frozen=True)
class Witness:
    """Bits of leaves, and what two expressions are there.

    Attributes:
        bits: of each leaf, by its number.
        got: bits of the first expression.
        expected: of the second.
    """

    bits: dict[int, int]
    got: int
    expected: int


def drawn(
    table: Table,
    numbers: Iterable[int],
    keep: Mapping[int, int],
    seed: int = 0,
    count: int = DRAWN,
    fixed: Mapping[int, int] = NOTHING,
) -> dict[int, Array]:
    """Bits of all leaves of some expressions.

    Args:
        table: that holds them.
        numbers: of the expressions.
        keep: bits that leaves have in a run; most assignments leave most leaves at these.
        seed: of the draw.
        count: assignments.
        fixed: leaves that have these bits in every assignment.
    """
    rng = np.random.default_rng(seed)
    every = needed(table, numbers)
    leaves = [n for n in every if table.rows[n].op == "leaf"]
    edges = {g: _edges(g, thresholds(table, every, g)) for g in (1, 2, 4)}
    # Some assignments change all leaves, others few or one of them.
    share = np.array([0.1, 0.7, 1.0 - 1.0 / max(len(leaves), 1)])[np.arange(count) % 3]
    found = {}
    for leaf in leaves:
        g = table.rows[leaf].granules
        if leaf in fixed:
            found[leaf] = np.array([[fixed[leaf]]], f"u{2 * g}")
            continue
        bits = _pool(rng, g, count, edges[g])
        if leaf in keep:
            kept = rng.random(count) < share
            bits = np.where(kept, np.array(keep[leaf], bits.dtype), bits)
        found[leaf] = bits.reshape(1, -1)
    return found


def thresholds(table: Table, numbers: Sequence[int], g: int) -> list[int]:
    """Constants among expressions, in a format of this many granules, and their neighbours."""
    found: set[int] = set()
    for number in numbers:
        row = table.rows[number]
        if row.op == "const" and row.granules in (1, 2, 4):
            value = np.array(row.args[0], f"u{2 * row.granules}").view(FLOAT[row.granules])
            with np.errstate(all="ignore"):
                own = int(value.astype(FLOAT[g]).view(f"u{2 * g}"))
            own = row.args[0] if row.granules == g else own
            found |= {own + d for d in (-1, 0, 1) if 0 <= own + d < 1 << 16 * g}
    return sorted(found)


def _edges(g: int, thresholds: Sequence[int]) -> Array:
    """Bits of the special numbers of formats of this many granules, and thresholds."""
    top = (1 << 16 * g) - 1
    special = [*thresholds, 0, 1, top >> 1, top]
    for bits in MANTISSA[g]:
        inf = (top >> 1) & ~((1 << bits) - 1)
        one = (inf >> 1) & ~((1 << bits) - 1)
        signed = (0, 1, 1 << bits, inf - 1, inf, inf | 1 << (bits - 1), one, one + 1, one - 1)
        special += [x | s for x in signed for s in (0, (top >> 1) + 1)]
    return np.array(special, f"u{2 * g}")


def _pool(rng: np.random.Generator, g: int, count: int, special: Array) -> Array:
    kind = np.dtype(f"u{2 * g}")
    top = (1 << 16 * g) - 1
    anything = rng.integers(0, top, count, kind, endpoint=True)
    reach = {1: 4, 2: 20, 4: 60}[g]
    real = rng.choice((-1.0, 1.0), count) * np.exp2(rng.uniform(-reach, reach, count))
    near = rng.choice((-1.0, 1.0), count) * rng.uniform(0.0, 2.0, count)
    ordinary = np.where(rng.random(count) < 0.5, real, near).astype(FLOAT[g]).view(kind)
    if g == 1:
        wide = np.where(rng.random(count) < 0.5, real, near).astype(np.float32).view(np.uint32)
        ordinary = np.where(rng.random(count) < 0.5, ordinary, (wide >> 16).astype(kind))
    edges = rng.choice(special, count)
    turn = rng.random(count)
    return np.where(turn < 0.15, anything, np.where(turn < 0.65, ordinary, edges))


def satisfying(
    table: Table,
    wanted: Sequence[tuple[int, bool]],
    keep: dict[int, int],
    first: Mapping[int, int] = NOTHING,
    rounds: int = 4,
) -> dict[int, int] | None:
    """Bits of leaves with which predicates have these outcomes; None if none were drawn.

    Args:
        table: that holds them.
        wanted: predicates and outcomes; the last is to turn.
        keep: bits of leaves in the run at hand.
        first: bits of leaves in the first run, with which the last may turn back.
        rounds: of draws.
    """
    numbers = [number for number, _ in wanted]
    # The last condition turns; what only the others depend on mostly stays.
    turning = set(leaves_of(table, numbers[-1:]))
    still = {leaf: bits for leaf, bits in keep.items() if leaf not in turning}
    for seed in range(rounds):
        fixed = still if seed < rounds - 1 else {}
        count = _count(table, numbers, fixed)
        back = {leaf: bits for leaf, bits in first.items() if leaf in turning}
        leaves = drawn(table, numbers, {**keep, **back} if seed % 2 else keep, seed, count, fixed)
        at = _first(_holding(wanted, evaluate(table, numbers, leaves), count))
        if at is not None:
            return {leaf: int(bits.flat[at % bits.size]) for leaf, bits in leaves.items()}
    return None


def _count(table: Table, numbers: Sequence[int], fixed: Mapping[int, int]) -> int:
    free = sum(leaf not in fixed for leaf in leaves_of(table, numbers))
    return min(DRAWN, max(256, LEAVES // max(free, 1)))


def _holding(wanted: Sequence[tuple[int, bool]], values: dict[int, Array], count: int) -> Array:
    held = np.ones((1, count), np.bool_)
    for number, outcome in wanted:
        held = held & (values[number] == outcome)
    return held


def _first(flags: Array) -> int | None:
    return int(np.argmax(flags)) if flags.any() else None


def telling(
    table: Table,
    a: int,
    b: int,
    dtype: str,
    path: Sequence[tuple[int, bool]],
    keep: dict[int, int],
    ranges: Mapping[int, Array] = NOWHERE,
    rounds: int = 3,
) -> Witness | None:
    """Bits of leaves on a path for which two expressions differ; None if none were drawn.

    Args:
        table: that holds them.
        a: number of the first.
        b: number of the second.
        dtype: `f16`, `bf16`, `f32`, `f64`, by which NaN are known; anything else has none.
        path: outcomes of conditions.
        keep: bits of leaves in the run.
        ranges: bits that some leaves are drawn from.
        rounds: of draws.
    """
    inside = set(leaves_of(table, [a, b]))
    # Conditions on other leaves are kept as they are in the run.
    path = [(n, o) for n, o in path if inside & set(leaves_of(table, [n]))]
    numbers = [a, b, *(number for number, _ in path)]
    count = _count(table, numbers, NOTHING)
    for seed in range(rounds):
        leaves = drawn(table, numbers, keep, seed, count)
        rng = np.random.default_rng(seed)
        for leaf in ranges.keys() & leaves.keys():
            some = rng.choice(ranges[leaf], count)
            held = rng.random(count) < np.arange(count) % 3 / 2
            leaves[leaf] = np.where(held, some.dtype.type(keep[leaf]), some).reshape(1, -1)
        values = evaluate(table, numbers, leaves)
        x, y = np.broadcast_arrays(values[a], values[b])
        differ = (x != y) & ~(is_nan(x, dtype) & is_nan(y, dtype))
        at = _first(differ & _holding(path, values, count))
        if at is not None:
            known = {leaf: int(bits.flat[at]) for leaf, bits in leaves.items()}
            width = x.shape[-1]
            return Witness(known, int(x.flat[at % width]), int(y.flat[at % width]))
    return None


def is_nan(bits: Array, dtype: str) -> Array:
    """Mask of the NaN of a format."""
    mantissa = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}.get(dtype)
    if mantissa is None:
        return np.zeros(bits.shape, np.bool_)
    top = (1 << 8 * bits.dtype.itemsize) - 1
    inf = (top >> 1) & ~((1 << mantissa) - 1)
    return np.asarray((bits & np.array(top >> 1, bits.dtype)) > np.array(inf, bits.dtype))
