"""Times of a group's rows in this process, turn by turn, as figures for a file.

Rounds go on until the ratio of every row to the first is known well, or the group's time is spent.
A round that has begun is finished, and there are never fewer than `LEAST`, or one less where
rounds are long.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from twinstep.benchmarks.beside.rows import MANY, PART, Group, Timed, best_threads, kin, rows
from twinstep.benchmarks.beside.subject import Shape
from twinstep.parity.registry.kernels import Kernel

Answer = dict[str, Any]
Cells = tuple[str, str, int, int]
SECONDS = 1.5  # of a group, after which no further round begins
LEAST, SURE = 3, 6  # rounds: of any group, and of one whose ratios may be called known
LONG = 6.0  # seconds of a group, after which two rounds are enough
LONG_CALL = 1.0  # seconds of a row other than the first, above which one turn is enough
KNOWN = 0.02  # half the width of an interval, relative


def measured(kernels: Sequence[Kernel], group: Cells, rounds: int) -> Answer:
    """Seconds of every row in every round, and what is absent.

    Args:
        kernels: registered.
        group: operation, dtype combination, tensors, elements of each.
        rounds: in which every row has a turn, at most.
    """
    operation, dtype, tensors, each = group
    which = Group(operation, dtype, Shape(tensors, each))
    found, moved = rows(kernels, which)
    ready = [row for row in found if row.subject is not None]
    for row in ready:
        assert row.subject is not None
        if not row.subject.turned:
            row.subject.settle()
        if tensors >= MANY:
            best_threads().setdefault(kin(which, row.name), row.subject.threads)
    gc.collect()
    gc.disable()
    try:
        times = turns(ready, rounds)
    finally:
        gc.enable()
        for row in ready:
            assert row.subject is not None
            row.subject.close()
    return {
        "bytes": moved,
        "rows": [
            {"name": name, "family": family, "version": version, "seconds": taken}
            for (name, family, version), taken in times.items()
        ],
        "threads": {row.name: row.subject.threads for row in ready if row.subject is not None},
        "absent": {row.name: row.absent for row in found if row.subject is None},
    }


def turns(ready: Sequence[Timed], rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Seconds of every row and of its parts in every round; the order turns from round to round.

    A row whose calls are long has a turn in the first round alone.
    """
    found: dict[tuple[str, str, str], list[float]] = {
        (row.name, row.family, row.version): [] for row in ready
    }
    begun, number = time.perf_counter(), 0
    while number < rounds and (number < LEAST or not enough(found, begun)):
        if number == LEAST - 1 and time.perf_counter() - begun > LONG:
            break
        places = list(range(len(ready)))
        places = places[number % len(places) :] + places[: number % len(places)]
        for place in places if number % 2 else reversed(places):
            row = ready[place]
            assert row.subject is not None
            if number and place and row.subject.seconds > LONG_CALL:
                continue
            found[(row.name, row.family, row.version)].append(row.subject.turn())
            for part, seconds in row.subject.parts().items():
                found.setdefault((part, PART, row.version), []).append(seconds)
        number += 1
    return found


def enough(found: dict[tuple[str, str, str], list[float]], begun: float) -> bool:
    """True where another round would be worth little, or the group's time is spent."""
    taken = time.perf_counter() - begun
    first, *others = found.values()
    others = [times for times in others if len(times) == len(first)]
    return taken > SECONDS or all(known(times, first) for times in others)


def known(times: Sequence[float], base: Sequence[float]) -> bool:
    """True if the median of the ratios is known to a share of `KNOWN`, by their order alone.

    Of n values the second smallest and the second largest hold the median with more than 95 % from
    n = 9 on, the outer ones from n = 6.

    >>> known([1.0] * 6, [1.0] * 6), known([1.0] * 5, [1.0] * 5), known([1, 2] * 6, [1] * 12)
    (True, False, False)
    """
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    if len(ratios) < SURE:
        return False
    drop = 0 if len(ratios) < 9 else 1
    middle = statistics.median(ratios)
    return ratios[-1 - drop] - ratios[drop] <= 2 * KNOWN * middle
