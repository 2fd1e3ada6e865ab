"""A run: every group in several fresh processes, as one document with ratios and intervals."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from twinstep.benchmarks.beside.classes import BYTES, SHARDED
from twinstep.benchmarks.beside.rows import AGAIN, CEILING, OURS, STEP, Group, groups_of
from twinstep.benchmarks.beside.statistics import Ratio, of_process, over_processes
from twinstep.benchmarks.beside.subject import Shape
from twinstep.benchmarks.runs.budget import Answers, Plan, effort, spend
from twinstep.benchmarks.runs.key import key_of
from twinstep.benchmarks.runs.machine import Others, available, needed
from twinstep.benchmarks.stamp import stamp
from twinstep.parity.registry.kernels import Kernel

Document = dict[str, Any]
SCHEMA = 1
SHAPES = (Shape(1, 2**24), Shape(200, 2**16), Shape(1000, 64))
CURVES = ("adamw_step", "global_norm")
SIZES = tuple(Shape(1, 10**power) for power in range(4, 10)) + (Shape(1, 3 * 10**7),)
TENSORS = tuple(Shape(count, 64) for count in (1, 10, 100, 10_000, 100_000))
STEPS = (Shape(200, 2**16), Shape(1000, 64))  # of whole classes
MANY = (Shape(21_000, 64), Shape(65_000, 64))  # one group of so many small parameters
MANY_DTYPES = ("fp32", "fp16")
BIG = 2**26  # bytes of a call from which on memory decides, not the host
TOLERANCE = 1.05  # above it a kernel is faster than memory allows, so something is wrong
WIDE = 1.1  # an interval whose ends are further apart is worth another process


def chosen_groups(
    kernels: Sequence[Kernel], operations: Sequence[str], curves: bool, classes: bool = False
) -> tuple[list[Group], list[Group], list[str]]:
    """Groups of the table, groups that are dear and come once, and those that memory does not hold.

    Args:
        kernels: registered.
        operations: whose groups are wanted; all, where there are none.
        curves: whether to add the points of curves.
        classes: whether to add whole steps of our classes.
    """
    kept = [k for k in kernels if not operations or k.operation.name in operations]
    table, once = groups_of(kept, SHAPES), list[Group]()
    if classes and (not operations or STEP in operations):
        table = [*groups_of_classes(), *table]
        once += [Group(STEP, dtype, shape) for shape in MANY for dtype in MANY_DTYPES]
    if curves:
        also = groups_of([k for k in kept if k.operation.name in CURVES], (*SIZES, *TENSORS))
        # A line of a curve is of one combination: the first of its operation.
        first = {group.operation: group.dtype for group in reversed(also)}
        once += [g for g in also if g.dtype == first[g.operation] and g not in table]
    once.sort(key=effort)  # the cheap first
    room = available() / 2
    needs = {group: needed(kept, group) for group in (*table, *once)}
    left_out = [
        f"{group}: needs {need / 2**30:.0f} GiB, but {room / 2**30:.0f} GiB are free for it"
        for group, need in needs.items()
        if need > room
    ]
    table, once = ([g for g in groups if needs[g] <= room] for groups in (table, once))
    return table, once, left_out


def groups_of_classes() -> list[Group]:
    """Whole steps; of DTensors one shape, since making a thousand takes minutes."""
    shapes = {dtype: STEPS[:1] if dtype == SHARDED else STEPS for dtype in BYTES}
    return [Group(STEP, dtype, shape) for dtype in BYTES for shape in shapes[dtype]]


def run(
    table: Sequence[Group],
    once: Sequence[Group],
    file: str,
    plan: Plan,
    told: Callable[[str], object],
) -> Document:
    """Time all groups in fresh processes, one after the other.

    Args:
        table: groups that every process times.
        once: groups that one process times, and others if the budget allows.
        file: of a user; empty for our kernels.
        plan: processes, rounds and seconds.
        told: is called with what is being timed.
    """
    source = str(Path(file).resolve()) if file else ""
    begun, others = os.getloadavg()[0], Others()
    answers = spend(table, once, source, plan, told, wide)
    found = [entry(group, given) for group, given in answers.of.items() if given]
    return {
        "schema": SCHEMA,
        "stamp": stamp(),
        "key": key_of(),
        "file": Path(file).name if file else "",
        "load": round(begun, 1),
        "others": others.share(),
        "processes": max((group["processes"] for group in found), default=0),
        "rounds": plan.rounds,
        "budget": plan.budget,
        "seconds": round(answers.taken),
        "groups": found,
        "cut": answers.cut,
        "problems": answers.problems,
        "errors": list(too_fast(found)),
    }


def wide(group: Group, given: Sequence[Answers]) -> bool:
    """True if a row's interval is so wide that another process would help."""
    rows = entry(group, given)["rows"]
    ends = [row["times_ours"] for row in rows if row["family"] != CEILING]
    return any(low is None or high > WIDE * low for low, _, high in ends)


def entry(group: Group, given: Sequence[Document]) -> Document:
    """Figures of one group from the answers of all processes."""
    times = [{row["name"]: row["seconds"] for row in answer["rows"]} for answer in given]
    first = next(row["name"] for row in given[0]["rows"] if row["family"] == OURS)
    passes = [row["name"] for row in given[0]["rows"] if row["family"] == CEILING]
    rows = []
    for row in given[0]["rows"]:
        name = row["name"]
        there = [one for one in times if name in one]
        seconds = statistics.median(statistics.median(one[name]) for one in there)
        ratio = over_processes([of_process(one[name], one[first]) for one in there])
        share = over_processes([ceiling_share(one, name, passes) for one in there])
        rows.append(
            {
                "name": name,
                "family": row["family"],
                "version": row["version"],
                "ms": rounded(1e3 * seconds),
                "best_ms": rounded(1e3 * min(min(one[name]) for one in there)),
                "gb_s": rounded(given[0]["bytes"] / seconds / 1e9),
                "times_ours": interval(ratio),
                "of_ceiling": interval(share),
                "threads": sorted({answer["threads"].get(name, 0) for answer in given} - {0}),
            }
        )
    return {
        "operation": group.operation,
        "dtype": group.dtype,
        "tensors": group.shape.tensors,
        "each": group.shape.each,
        "bytes": given[0]["bytes"],
        "processes": len(given),
        "fewest_rounds": min(len(one[first]) for one in times),
        "rows": rows,
        "absent": given[0]["absent"],
    }


def ceiling_share(times: dict[str, list[float]], name: str, passes: Sequence[str]) -> float:
    """Time of the fastest plain pass over that of a row, in one process."""
    return min(of_process(times[one], times[name]) for one in passes)


def interval(ratio: Ratio) -> list[float | None]:
    """Low, middle and high of a ratio; one process has no interval."""
    if ratio.processes == 1:
        return [None, rounded(ratio.middle), None]
    return [rounded(x) for x in (ratio.low, ratio.middle, ratio.high)]


def rounded(value: float) -> float:
    """A figure with four digits.

    >>> rounded(123456.0), rounded(0.0123456)
    (123500.0, 0.01235)
    """
    return float(f"{value:.4g}")


def too_fast(groups: Sequence[Document]) -> Iterator[str]:
    """Sentences on kernels that are faster than memory allows: they cannot have done the work.

    The whole interval over processes must lie above the fastest pass, and the quickest turn, too:
    on a busy machine passes are held up in nearly every turn, and the quickest of few is no limit.
    """
    for group in groups:
        passes = [row["best_ms"] for row in group["rows"] if row["family"] == CEILING]
        for row in group["rows"]:
            low, _, _ = row["of_ceiling"]
            times = min(passes) / row["best_ms"]
            sure = low is not None and min(low, times) > TOLERANCE
            if row["family"] == OURS and group["bytes"] >= BIG and sure:
                yield (
                    f"{row['name']} {group['dtype']} {title(group)}: {times:.2f} times as fast as "
                    f"the fastest pass over as many bytes, so it cannot have moved them all"
                )


def title(group: Document) -> str:
    """The shape of a group, as the table has it."""
    return str(Shape(group["tensors"], group["each"]))


def controls(groups: Sequence[Document]) -> list[tuple[str, list[float | None]]]:
    """The A/A control of every group, our first row beside itself, the furthest from 1 first."""
    found: list[tuple[str, list[float | None]]] = [
        (f"{group['operation']} {group['dtype']} {title(group)}", row["times_ours"])
        for group in groups
        for row in group["rows"]
        if row["name"].endswith(AGAIN)
    ]
    return sorted(found, key=lambda row: -abs(math.log(row[1][1] or 1.0)))
