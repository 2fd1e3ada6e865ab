"""Times of a group's rows in this process, turn by turn, as figures for a file."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from twinstep.benchmarks.beside.rows import Group, rows
from twinstep.benchmarks.beside.subject import Shape, turns
from twinstep.parity.registry.kernels import Kernel

Answer = dict[str, Any]
Cells = tuple[str, str, int, int]
SECONDS = 1.5  # of a group, after which no further round begins
LEAST = 3  # rounds


def measured(kernels: Sequence[Kernel], group: Cells, rounds: int) -> Answer:
    """Seconds of every row in every round, and what is absent.

    Args:
        kernels: registered.
        group: operation, dtype combination, tensors, elements of each.
        rounds: in which every row has a turn.
    """
    operation, dtype, tensors, each = group
    found, moved = rows(kernels, Group(operation, dtype, Shape(tensors, each)))
    ready = [(row, row.subject) for row in found if row.subject is not None]
    for _, subject in ready:
        subject.settle()
    cycle = sum(subject.turn() * subject.repeats for _, subject in ready)
    affordable = max(LEAST, round(SECONDS / cycle))
    gc.collect()
    gc.disable()
    try:
        times = turns([subject for _, subject in ready], min(rounds, affordable))
    finally:
        gc.enable()
    return {
        "bytes": moved,
        "rows": [
            {"name": row.name, "family": row.family, "version": row.version, "seconds": taken}
            for (row, _), taken in zip(ready, times, strict=True)
        ],
        "absent": {row.name: row.absent for row in found if row.subject is None},
    }
