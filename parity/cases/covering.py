"""Recipes of cases: the same ones for the same seed on every machine, and few that cover much.

The judge draws nothing at run time. A *covering* is a list of recipes by a covering design: every
control, option, shape and flag is a factor, a row gives each factor a value, and each next row is
the one of some random candidates that shows the most pairs of values for the first time. Values
take balanced turns, so that a factor of n values has shown all of them after n rows; the regimes
follow one another in a fixed order. The first rows of a long covering are those of a short one.
One of the values of most controls is a number drawn from its range, another one each time. In a
third of the rows some controls have values that belong together (`Operation.together`).

Each dtype combination has a covering of its own, or its own part of one that all of them share.

One row of a mixture shows every finite regime at every size class with that row's controls, so that
pairs of rows are triples of regime, size class and control value: `parity.cases.coverage` counts
them.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import cast

import torch

from twinstep.parity.cases.case import Recipe
from twinstep.parity.operations.operation import Control, Operation, OptionValue, Range, Role

Value = OptionValue | float

# Every regime has its turn, and the first cases see the most; a mixture holds all finite ones.
TURNS = (
    "mixture",
    "planted",
    "bits",
    "cancelling",
    "mixture",
    "tiny_root",
    "ties",
    "extreme",
    "ordinary",
    "planted",
    "subnormal",
    "zeros",
)
CLASSES: Mapping[str, tuple[int, ...]] = {
    "tiny": (1, 2, 3, 4, 5, 7, 8, 9),
    "vector": (15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129),
    "block": (255, 256, 257, 509, 511, 512, 513, 1021, 1023, 1024, 1025),
    "large": (2047, 2049, 4095, 4096, 4097, 4099),
}
# Elements of matrices beside the others of a list: rows or columns are few, or more than any block.
MATRICES = (3 * 1021, 2 * 2053, 5 * 4096, 7 * 131, 4 * 1024, 3 * 513)
SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "list": {
        "assorted": ("tiny", "vector", "block", "large"),
        "paired": ("tiny", "vector", "block"),
        "equal": ("vector",),
        "many tiny": ("tiny",),
        "empties": ("tiny", "vector", "block"),
        "long": ("tiny", "vector", "large"),
    },
    "flat": {name: (name,) for name in ("block", "vector", "large", "tiny")},
}
# Completed steps; several of them, plus one, are no bf16 numbers. FADING and FADED are in units of
# 1 / (1 - beta2): over the one a correction of the bias goes, over the other its last 4.5e-5.
USUAL, LATE = Range(low=1.0, high=5e3), Range(low=5e3, high=2.0**40)
FADING, FADED = Range(low=2.0, high=17.0), Range(low=10.05, high=11.5)
EARLY = 4
STEPS = (
    *(4, 0, 1, 2, FADED, USUAL, 9, 300, 1_002, FADING),
    *(2**24 + 1, LATE, 2**31 - 1, 2**53),
)
TOO_SMALL = ("flat:tiny",)
CANDIDATES = 16
FEW = 6
# Elements of the large tensor: of the first dtype combination of a kernel, of the second, just past
# 2^20, and of the others; and where large tensors are slow. Values repeat after a prime number.
LARGE = (
    Range(low=2**20.5, high=2**21),
    Range(low=2**20 + 1, high=2**20 + 2**12),
    Range(low=2**20 + 1, high=2**21),
)
LARGE_WHERE_SLOW = Range(low=2**19 + 1, high=2**20)
# Beside it in a list where large tensors are quick: whole chunks of any usual size.
WHOLE = 3 * 2**18
PERIOD = 4093
# A short range may hold listed values alone.
TRIES = 9
# Tensors in the longest list, likewise; more than a table of 512 or 1,024 places takes. Where a
# launch is slow, and a kernel may have one for each tensor, for norms in the first combination.
NUMEROUS = (Range(low=1_025, high=1_400), Range(low=513, high=700), Range(low=260, high=1_000))
# Rows after which every value of a factor has been shown.
ROUND = len(TURNS)
ALONE: Mapping[str, Value] = {}
Factors = Mapping[str, Sequence[Value | None]]
Row = dict[str, int]


def size_class(size: int) -> str:
    """The class of a tensor by its number of elements: none, tiny, vector, block or large."""
    if size == 0:
        return "none"
    return next((name for name, sizes in CLASSES.items() if size <= sizes[-1]), "large")


def factors(operation: Operation, layouts: Sequence[str]) -> Factors:
    """Everything a row gives a value to, and the values; the first is the ordinary one."""
    found: dict[str, Sequence[Value | None]] = {
        row.name: (*row.values, *[None] * (row.range is not None)) for row in operation.controls
    }
    found |= {row.name: row.choices for row in operation.options}
    if operation.lists:
        kinds = [kind for kind in SHAPES if kind in layouts]
        found["shape"] = tuple(f"{kind}:{name}" for kind in kinds for name in SHAPES[kind])
        found |= {"dims": operation.dims, "guard": (0x5A, 0xFF), "one_step": (False, True)}
        found["requires_grad"] = (False, True)
        if any(argument.optional for argument in operation.lists):
            found["absent"] = (False, False, True)
        if operation.lists_of(Role.STEPS):
            found["step"] = tuple(range(len(STEPS)))
    return found


def together(operation: Operation) -> Sequence[Mapping[str, Value]]:
    """Settings of a round of rows: none in most, each of those that belong together in one."""
    sets = operation.together
    return (*[ALONE] * max(ROUND - len(sets), len(sets)), *sets) if sets else ()


@lru_cache(maxsize=256)
def _rows(
    names: tuple[tuple[str, int], ...],
    given: tuple[frozenset[str], ...],
    shapes: tuple[str, ...],
    count: int,
    seed: str,
) -> list[Row]:
    """A covering design: `count` rows over factors of that many values each.

    Args:
        names: factors, and how many values each has.
        given: for each value of the factor "together" the factors that it gives a value to; they
            have no turn of their own in that row. Empty if there is none.
        shapes: the values of the factor "shape"; empty if there is none.
        count: rows.
        seed: of the candidates.
    """
    dice = random.Random(seed)
    sizes = [*names, ("together", len(given))] if given else names
    used = {name: Counter(dict.fromkeys(range(size), 0)) for name, size in sizes}
    shown: set[tuple[int, ...]] = set()
    rows: list[Row] = []
    known: dict[object, int] = {}
    for number in range(count):
        regime = TURNS[number % len(TURNS)]
        barred = _barred(shapes, regime, number)
        candidates = [_candidate(used, given, barred, dice) for _ in range(CANDIDATES)]
        candidates = candidates if number else [{name: 0 for name, _ in sizes}]
        pairs = [_tuples(row, regime, shapes, known) for row in candidates]
        best = max(range(len(candidates)), key=lambda at: len(pairs[at] - shown))
        rows.append(candidates[best])
        shown |= pairs[best]
        for name, value in rows[-1].items():
            used[name][value] += 1
    return rows


def _barred(shapes: Sequence[str], regime: str, number: int) -> frozenset[int]:
    """Shapes that are not for this row: every third is flat, and a mixture needs some elements."""
    layout = "flat" if number % 3 == 1 else "list"
    others = {at for at, shape in enumerate(shapes) if not shape.startswith(layout)}
    small = {at for at, shape in enumerate(shapes) if shape in TOO_SMALL and regime == "mixture"}
    # A kernel of one layout alone has shapes of that one only.
    return frozenset(small if len(others) == len(shapes) else small | others)


def _candidate(
    used: dict[str, Counter[int]],
    given: Sequence[frozenset[str]],
    barred: frozenset[int],
    dice: random.Random,
) -> Row:
    """A row of values that have been used least; no barred shape."""
    row: Row = {}
    # What gives values to others comes last among the factors, and has its turn first.
    for name, counts in reversed(used.items()):
        if given and name in given[row.get("together", 0)]:
            continue
        open_ = {v: n for v, n in counts.items() if name != "shape" or v not in barred} or counts
        least = min(open_.values())
        row[name] = dice.choice([value for value, count in open_.items() if count == least])
    return row


def _tuples(
    row: Row, regime: str, shapes: Sequence[str], known: dict[object, int]
) -> set[tuple[int, ...]]:
    """What a row shows together: pairs of values; triples and fours where there are no tensors.

    Args:
        row: to look at.
        regime: of the row.
        shapes: the values of the factor "shape".
        known: numbers of the values, which are quicker to compare; gets new ones.
    """
    items: list[object] = [item for item in row.items() if item[0] != "shape"]
    if shapes:
        layout, _, kind = shapes[row["shape"]].partition(":")
        items += [regime, layout, *SHAPES[layout][kind]]
    numbers = sorted(known.setdefault(item, len(known)) for item in items)
    if shapes:
        return set(combinations(numbers, 2))
    fours = combinations(numbers, 4) if len(numbers) <= FEW else ()
    return {*combinations(numbers, 2), *combinations(numbers, 3), *fours}


def covering_recipes(
    operation: Operation,
    combination: str,
    layouts: Sequence[str],
    count: int,
    seed: int | None,
    *,
    shared: bool = False,
) -> list[Recipe]:
    """`count` recipes for an operation with one dtype combination.

    Args:
        operation: whose controls, options and lists get values.
        combination: dtype combination; other ones have other rows.
        layouts: `flat`, `list` or both; none for operations without lists.
        count: number of recipes.
        seed: of the whole; None is a seed too.
        shared: all combinations share one covering, of which this one has its part.
    """
    choices = factors(operation, layouts)
    names = tuple((name, len(values)) for name, values in choices.items())
    given = tuple(frozenset(row) for row in together(operation))
    words = f"{operation.name}/{'+'.join(layouts)}/{seed or 0}"
    words += "" if shared else f"/{combination}"
    parts = list(operation.combinations) if shared else [combination]
    first = count * parts.index(combination)
    shapes = tuple(map(str, choices.get("shape", ())))
    rows = _rows(names, given, shapes, count * len(parts), words)
    return [
        _recipe(operation, choices, row, TURNS[at % len(TURNS)], f"{words}/{at}/{combination}")
        for at, row in enumerate(rows[first : first + count], first)
    ]


def _recipe(operation: Operation, choices: Factors, row: Row, regime: str, words: str) -> Recipe:
    sets = together(operation)
    values = {name: choices[name][at] for name, at in row.items() if name != "together"}
    if sets and sets[row["together"]]:
        # What is customary meets early steps, where corrections of the bias show, and all lists.
        values |= {**sets[row["together"]], "step": row.get("step", 0) % EARLY, "absent": False}
    controls = {row.name: _value(row, values[row.name], words) for row in operation.controls}
    options = {row.name: cast(OptionValue, values[row.name]) for row in operation.options}
    if not operation.lists:
        return Recipe(layout="list", sizes=(), controls=controls, options=options)
    layout, _, kind = str(values["shape"]).partition(":")
    dice, dims = random.Random(words), cast(int, values["dims"])
    sizes = _sizes(layout, kind, dice)
    beside = {0: (1, 1), 2: (dice.choice(MATRICES),) * 2} if layout == "list" else {}
    return Recipe(
        layout=layout,
        sizes=(*sizes, *beside.get(dims, ())),
        regime=regime,
        seed=seed_of(words),
        controls=controls,
        options=options,
        dims=dims,
        requires_grad=bool(values["requires_grad"]),
        absent=bool(values.get("absent", False)),
        guard=cast(int, values["guard"]),
        one_step=bool(values["one_step"]),
        step=cast(int, values.get("step", 0)),
    )


def _value(control: Control, chosen: Value | None, words: str) -> float:
    """The chosen value, or one drawn from the control's range that is not listed."""
    # A float would lose the last bits of a counter.
    kind = int if control.dtype == torch.int64 else float
    if chosen is not None or control.range is None:
        return kind(cast(float, chosen))
    dice, span = random.Random(f"{words}/{control.name}"), control.range
    drawn = (kind(span.at(dice.random())) for _ in range(TRIES))
    return next((value for value in drawn if value not in control.values), control.values[0])


def completed_steps(turn: int, seed: int, beta2: float) -> int:
    """Completed steps of a tensor whose turn it is; the seed decides those that are drawn."""
    listed = STEPS[turn % len(STEPS)]
    if isinstance(listed, Range):
        drawn = listed.at(random.Random(f"{seed}/{turn}").random())
        return int(drawn / (1.0 - beta2) if listed in (FADING, FADED) else drawn)
    return listed


def seed_of(words: str) -> int:
    """A 32-bit seed that is the same everywhere."""
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "little")


def _sizes(layout: str, kind: str, dice: random.Random) -> tuple[int, ...]:
    """Elements per tensor: boundaries, primes, many tiny ones, empties; at least one element."""
    if layout == "flat":
        return (dice.choice(CLASSES[kind]),)
    one = {name: dice.choice(sizes) for name, sizes in CLASSES.items()}
    row = {
        "assorted": [one["tiny"], one["vector"], one["block"], one["large"], dice.randint(1, 300)],
        "paired": [one["vector"], one["tiny"], one["block"], one["vector"], one["tiny"]],
        "equal": [one["vector"]] * dice.randint(3, 6),
        "many tiny": [1, 2, 3] * dice.randint(3, 12),
        "empties": [0, one["tiny"], 0, one["vector"], one["block"], 0],
        "long": [one["large"], one["tiny"], one["vector"]],
    }[kind]
    if kind in ("assorted", "empties"):
        dice.shuffle(row)
    return tuple(row)


def enlarged(
    operation: Operation, recipe: Recipe, sizes: Range, beside: Sequence[int] = (), turn: int = 0
) -> Recipe:
    """The recipe with a large tensor, ordinary controls, and every regime where none drowns a sum.

    Its values repeat: that is cheap, and the period is no multiple of any block.

    Args:
        operation: whose controls have their first values.
        recipe: that is changed.
        sizes: elements of the large tensor.
        beside: elements of others, where there is a list.
        turn: of the dtype combination: lists are of matrices, tall in even turns, wide in odd ones.
    """
    size = int(sizes.at(random.Random(recipe.seed).random()))
    flat = recipe.layout == "flat"
    drawn = (size,) if flat else (5, *beside, size, 33)
    return replace(
        recipe,
        sizes=drawn,
        dims=recipe.dims if flat or 2 not in operation.dims else 2,
        # A matrix is tall where seed and place are even together (`generate`).
        seed=recipe.seed & ~1 | (turn + drawn.index(size)) % 2,
        regime="ordinary" if operation.takes_norms else "mixture",
        controls={row.name: row.values[0] for row in operation.controls},
        period=PERIOD,
    )


def crowd(operation: Operation, recipe: Recipe, counts: Range) -> Recipe:
    """The recipe with a long list of tiny tensors, and ordinary controls.

    Args:
        operation: whose controls have their first values.
        recipe: that is changed.
        counts: of tensors.
    """
    dice = random.Random(recipe.seed)
    return replace(
        recipe,
        layout="list",
        sizes=tuple(dice.choice((1, 2, 3, 5)) for _ in range(int(counts.at(dice.random())))),
        regime="ordinary",
        controls={row.name: row.values[0] for row in operation.controls},
    )


def diminished(recipe: Recipe, number: int) -> Recipe:
    """The recipe with small tensors, two times in three of one size, and different early steps."""
    sizes = small_sizes(recipe.layout, str(recipe.seed))
    if recipe.layout == "list" and number % 3:
        sizes = (max(sizes),) * len(sizes)
    return replace(recipe, sizes=sizes, one_step=False, step=recipe.step % EARLY)


def small_sizes(layout: str, words: str) -> tuple[int, ...]:
    """Some dozen elements: one tensor, or a few."""
    dice = random.Random(words)
    sizes = (5, 1, 2, 3, 4, 7, 8, 17, 33, 130)
    return tuple(dice.choice(sizes) for _ in range(1 if layout == "flat" else 3))
