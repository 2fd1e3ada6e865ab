"""A run: every group in several fresh processes, as one document with ratios and intervals."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from twinstep.benchmarks.beside.rows import AGAIN, CEILING, OURS, Group, groups_of
from twinstep.benchmarks.beside.statistics import Ratio, of_process, over_processes
from twinstep.benchmarks.beside.subject import Shape
from twinstep.benchmarks.regressions.sides import HERE, Checkout, Process, SideFailed
from twinstep.benchmarks.runs.key import key_of
from twinstep.benchmarks.stamp import stamp
from twinstep.parity.registry.kernels import Kernel

Document = dict[str, Any]
SCHEMA = 1
SHAPES = (Shape(1, 2**24), Shape(200, 2**16), Shape(1000, 64))
CURVES = ("adamw_step", "global_norm")
SIZES = tuple(Shape(1, 10**power) for power in (4, 5, 6, 7, 8, 9))
TENSORS = tuple(Shape(count, 64) for count in (1, 10, 100, 10_000, 21_000, 65_000, 100_000))
HELD = 40  # bytes of an element in all tensors of one row, and what restores them
ROWS = 8  # that are held at once
BIG = 2**26  # bytes of a call from which on memory decides, not the host
TOLERANCE = 1.05  # above it a kernel is faster than memory allows, so something is wrong


def chosen_groups(
    kernels: Sequence[Kernel], operations: Sequence[str], curves: bool
) -> tuple[list[Group], list[str]]:
    """Groups to time, and those that memory does not hold, each with the reason."""
    kept = [k for k in kernels if not operations or k.operation.name in operations]
    found = groups_of(kept, SHAPES)
    if curves:
        also = groups_of([k for k in kept if k.operation.name in CURVES], (*SIZES, *TENSORS))
        # A line of a curve is of one combination: the first of its operation.
        first = {group.operation: group.dtype for group in reversed(also)}
        also = [group for group in also if group.dtype == first[group.operation]]
        found += [group for group in also if group not in found]
    room = available() / 2
    left_out = [
        f"{group}: needs {group.shape.numel * HELD * ROWS / 2**30:.0f} GiB, "
        f"but {room / 2**30:.0f} GiB are free for it"
        for group in found
        if group.shape.numel * HELD * ROWS > room
    ]
    return [g for g in found if g.shape.numel * HELD * ROWS <= room], left_out


def available() -> int:
    """Bytes of memory that are free where kernels are timed."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run(
    groups: Sequence[Group],
    file: str,
    processes: int,
    rounds: int,
    told: Callable[[str], object],
) -> Document:
    """Time all groups; every process times every group once, but curves only the first.

    Args:
        groups: what to time.
        file: of a user; empty for our kernels.
        processes: fresh ones, one after the other.
        rounds: in which every row of a group has a turn.
        told: is called with what is being timed.
    """
    answers: dict[Group, list[Document]] = {group: [] for group in groups}
    problems: list[str] = []
    source = str(Path(file).resolve()) if file else ""
    for number in range(processes):
        with ExitStack() as stack:
            side = stack.enter_context(Process(Checkout("this checkout", HERE, source)))
            for group in groups:
                if number and group.shape not in SHAPES:
                    continue  # a curve
                told(f"process {number + 1} of {processes}, {group}")
                shape = group.shape
                row = [group.operation, group.dtype, shape.tensors, shape.each]
                try:
                    answers[group].append(side.ask("beside", group=row, rounds=rounds))
                except SideFailed as failure:
                    problems.append(f"{group}: {failure}")
    found = [entry(group, given) for group, given in answers.items() if given]
    return {
        "schema": SCHEMA,
        "stamp": stamp(),
        "key": key_of(),
        "file": Path(file).name if file else "",
        "load": round(os.getloadavg()[0], 1),
        "processes": processes,
        "rounds": rounds,
        "groups": found,
        "problems": problems,
        "errors": list(too_fast(found)),
    }


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
            }
        )
    return {
        "operation": group.operation,
        "dtype": group.dtype,
        "tensors": group.shape.tensors,
        "each": group.shape.each,
        "bytes": given[0]["bytes"],
        "rows": rows,
        "absent": given[0]["absent"],
    }


def ceiling_share(times: dict[str, list[float]], name: str, passes: Sequence[str]) -> float:
    """Time of the fastest plain pass over that of a row, in one process."""
    return max(of_process(times[one], times[name]) for one in passes)


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

    The quickest turns are compared: others on the machine slow both, but not always alike.
    """
    for group in groups:
        passes = [row["best_ms"] for row in group["rows"] if row["family"] == CEILING]
        for row in group["rows"]:
            times = min(passes) / row["best_ms"]
            if row["family"] == OURS and group["bytes"] >= BIG and times > TOLERANCE:
                yield (
                    f"{row['name']} {group['dtype']} {title(group)}: {times:.2f} times as fast as "
                    f"the fastest pass over as many bytes, so it cannot have moved them all"
                )


def title(group: Document) -> str:
    """The shape of a group, as the table has it."""
    return str(Shape(group["tensors"], group["each"]))


def controls(groups: Sequence[Document]) -> list[tuple[str, list[float | None]]]:
    """The A/A control of every group: our first kernel beside itself."""
    return [
        (f"{group['operation']} {group['dtype']} {title(group)}", row["times_ours"])
        for group in groups
        for row in group["rows"]
        if row["name"].endswith(AGAIN)
    ]
