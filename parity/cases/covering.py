"""Recipes of cases: the same ones for the same seed on every machine, and few that cover much.

The judge draws nothing at run time. A *covering* is a list of recipes by a covering design: every
control, option, shape and flag is a factor, a row gives each factor a value, and each next row is
the one of some random candidates that shows the most pairs of values for the first time. Values
take balanced turns, so that a factor of n values has shown all of them after n rows; the regimes
follow one another in a fixed order. The first rows of a long covering are those of a short one.

One row of a mixture shows every finite regime at every size class with that row's controls, so that
pairs of rows are triples of regime, size class and control value: `parity.cases.coverage` counts
them.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations

from twinstep.parity.cases.case import Recipe
from twinstep.parity.operations.operation import Operation, Role

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
SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "list": {
        "assorted": ("tiny", "vector", "block", "large"),
        "paired": ("tiny", "vector", "block"),
        "many tiny": ("tiny",),
        "empties": ("tiny", "vector", "block"),
        "long": ("tiny", "vector", "large"),
    },
    "flat": {name: (name,) for name in ("block", "vector", "large", "tiny")},
}
# Completed steps; several of them, plus one, are no bf16 numbers.
STEPS = (4, 0, 1, 2, 9, 300, 1_002, 20_000, 2**24 + 1)
TOO_SMALL = ("flat:tiny",)
CANDIDATES = 16
FEW = 6
Value = float | int | str | bool
Row = dict[str, int]
Factors = dict[str, tuple[Value, ...]]


def size_class(size: int) -> str:
    """The class of a tensor by its number of elements: none, tiny, vector, block or large."""
    if size == 0:
        return "none"
    return next((name for name, sizes in CLASSES.items() if size <= sizes[-1]), "large")


def factors(operation: Operation, layouts: Sequence[str]) -> Factors:
    """Everything a row gives a value to, and the values; the first is the ordinary one."""
    found: Factors = {row.name: row.values for row in operation.controls}
    found |= {row.name: row.choices for row in operation.options}
    if operation.lists:
        kinds = [kind for kind in SHAPES if kind in layouts]
        found["shape"] = tuple(f"{kind}:{name}" for kind in kinds for name in SHAPES[kind])
        found |= {"planes": (False, True), "guard": (0x5A, 0xFF), "one_step": (False, True)}
        if any(argument.optional for argument in operation.lists):
            found["absent"] = (False, False, True)
        if operation.lists_of(Role.STEPS):
            found["step"] = tuple(range(len(STEPS)))
    return found


@lru_cache(maxsize=256)
def _rows(
    names: tuple[tuple[str, int], ...], shapes: tuple[str, ...], count: int, seed: str
) -> list[Row]:
    """A covering design: `count` rows over factors of so many values each.

    Args:
        names: factors, and how many values each has.
        shapes: the values of the factor "shape"; empty if there is none.
        count: rows.
        seed: of the candidates.
    """
    dice = random.Random(seed)
    used = {name: Counter(dict.fromkeys(range(size), 0)) for name, size in names}
    shown: set[tuple[object, ...]] = set()
    rows: list[Row] = []
    for number in range(count):
        regime = TURNS[number % len(TURNS)]
        barred = _barred(shapes, regime, number)
        candidates = [_candidate(used, barred, dice) for _ in range(CANDIDATES)]
        candidates = candidates if number else [{name: 0 for name, _ in names}]
        pairs = [_tuples(row, regime, shapes) for row in candidates]
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
    used: Mapping[str, Counter[int]], barred: frozenset[int], dice: random.Random
) -> Row:
    """A row of values that have been used least; no barred shape."""
    row = {}
    for name, counts in used.items():
        open_ = {v: n for v, n in counts.items() if name != "shape" or v not in barred} or counts
        least = min(open_.values())
        row[name] = dice.choice([value for value, count in open_.items() if count == least])
    return row


def _tuples(row: Row, regime: str, shapes: Sequence[str]) -> set[tuple[object, ...]]:
    """What a row shows together: pairs of values; triples and fours where there are no tensors."""
    items: list[object] = [item for item in row.items() if item[0] != "shape"]
    if not shapes:
        fours = combinations(items, 4) if len(items) <= FEW else ()
        return {*combinations(items, 2), *combinations(items, 3), *fours}
    layout, _, kind = shapes[row["shape"]].partition(":")
    items += [regime, layout, *SHAPES[layout][kind]]
    return set(combinations(items, 2))


def covering_recipes(
    operation: Operation, combination: str, layouts: Sequence[str], count: int, seed: int | None
) -> list[Recipe]:
    """`count` recipes for an operation with one dtype combination.

    Args:
        operation: whose controls, options and lists get values.
        combination: dtype combination; gives the values a seed of their own.
        layouts: `flat`, `list` or both; none for operations without lists.
        count: number of recipes.
        seed: of the whole; None is a seed too.
    """
    choices = factors(operation, layouts)
    names = tuple((name, len(values)) for name, values in choices.items())
    words = f"{operation.name}/{'+'.join(layouts)}/{seed or 0}"
    rows = _rows(names, tuple(map(str, choices.get("shape", ()))), count, words)
    return [
        _recipe(
            operation, choices, row, TURNS[number % len(TURNS)], f"{words}/{number}", combination
        )
        for number, row in enumerate(rows)
    ]


def _recipe(
    operation: Operation, choices: Factors, row: Row, regime: str, words: str, combination: str
) -> Recipe:
    values = {name: choices[name][at] for name, at in row.items()}
    controls = {control.name: float(values[control.name]) for control in operation.controls}
    options = {option.name: option.choices[row[option.name]] for option in operation.options}
    if not operation.lists:
        return Recipe(layout="list", sizes=(), controls=controls, options=options)
    layout, _, kind = str(values["shape"]).partition(":")
    return Recipe(
        layout=layout,
        sizes=_sizes(layout, kind, random.Random(words)),
        regime=regime,
        seed=seed_of(f"{words}/{combination}"),
        controls=controls,
        options=options,
        planes=bool(values["planes"]),
        absent=bool(values.get("absent", False)),
        guard=int(values["guard"]),
        one_step=bool(values["one_step"]),
        step=int(values.get("step", 0)),
    )


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
        "many tiny": [1, 2, 3] * dice.randint(3, 12),
        "empties": [0, one["tiny"], 0, one["vector"], one["block"], 0],
        "long": [one["large"], one["tiny"], one["vector"]],
    }[kind]
    if kind in ("assorted", "empties"):
        dice.shuffle(row)
    return tuple(row)


def small_sizes(layout: str, words: str) -> tuple[int, ...]:
    """Some dozen elements: one tensor, or a few."""
    dice = random.Random(words)
    row = [
        dice.choice((5, 2, 3, 4, 7, 8, 17, 33, 130)) for _ in range(1 if layout == "flat" else 3)
    ]
    return tuple(row)
