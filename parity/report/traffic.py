"""Bytes per parameter and instructions per parameter, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from twinstep.parity.operations.operation import LAYOUTS
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.table import plain_table
from twinstep.parity.report.traffic_count import Count, counted
from twinstep.parity.report.traffic_design import REST, REST_AT

MEASURED = (("adamw_step", "bf16"), ("mixed_step", "bf16"), ("mixed_step", "fp16"))
SCHEMA = 1
MARK = {"read": "r", "write": "w", "atomic": "a"}


def traffic_of(chosen: Selection) -> list[Count] | str:
    """Counts at the end of `parity run`, for the selected operations; why none can be counted."""
    register_house()
    wanted = [
        (kernel, dtype)
        for operation, dtype in MEASURED
        for kernel in kernels()
        if kernel.name == f"triton.{operation}"
        and (not chosen.operations or operation in chosen.operations)
    ]
    if chosen.names or chosen.laws:
        return []
    try:
        return [c for kernel, dtype in wanted for c in counted(kernel, dtype, LAYOUTS[0])]
    except (ImportError, UsageError) as error:
        return str(error)


def print_traffic(screen: Console, counts: Sequence[Count] | str) -> None:
    """Print the short table, or why there is none."""
    if isinstance(counts, str):
        screen.print(f"bytes per parameter: not counted, {counts}", highlight=False)
    elif counts:
        screen.print(bytes_table(counts, by_argument=False))


def bytes_table(counts: Sequence[Count], by_argument: bool = True) -> Table:
    """Bytes per parameter, one line for each launch."""
    long = ("operation", "dtype", "layout", "launch", "by argument")
    table = plain_table(
        f"bytes per parameter (read + written), {counts[0].parameters} parameters, "
        f"counted by replay",
        long if by_argument else ("step", "launch"),
        ("read", "written", "design", "the rest"),
    )
    before = ""
    for count, group in zip(counts, _groups(counts), strict=True):
        design = sum(map(sum, count.design.values())) / count.parameters
        moved = sum(one.read + one.written for one in group)
        exact = moved == sum(map(sum, count.design.values()))
        call = f"{count.operation} {count.dtype} {count.layout}"
        names = (count.operation, count.dtype, count.layout) if call != before else ("", "", "")
        before = call
        arguments = ", ".join(f"{name} {_pair(count, name)}" for name in count.sized)
        short = (" ".join(names[:2]), count.launch)
        table.add_row(
            *((*names, count.launch, arguments) if by_argument else short),
            f"{count.read / count.parameters:.2f}",
            f"{count.written / count.parameters:.2f}",
            f"{design:.2f}" + ("" if exact else " !"),
            f"{count.rest / count.parameters:.4f}",
        )
    return table


def work_table(counts: Sequence[Count]) -> Table:
    """Table of memory accesses and instructions of the same launches."""
    table = plain_table(
        "thread accesses of global memory by width, instructions per parameter",
        ("operation", "dtype", "layout", "launch", "accesses (width in bytes: count)"),
        ("instructions", "shared r + w", "barriers"),
    )
    for count in counts:
        widths = sorted(count.widths.items(), key=lambda item: -item[0][1] * item[1])
        classes = sorted(count.classes.items(), key=lambda item: -item[1])
        table.add_row(
            count.operation,
            count.dtype,
            count.layout,
            count.launch,
            " ".join(f"{MARK[kind]}{size}:{_short(number)}" for (kind, size), number in widths),
            " ".join(f"{name} {number / count.parameters:.2f}" for name, number in classes),
            f"{_short(count.shared[0])} + {_short(count.shared[1])}",
            _short(count.barriers),
        )
    return table


def as_json(counts: Sequence[Count]) -> str:
    """All counts, in bytes, accesses and instructions of whole launches."""
    rows = [
        {
            "operation": count.operation,
            "kernel": count.kernel,
            "dtype": count.dtype,
            "layout": count.layout,
            "launch": count.launch,
            "grid": count.grid,
            "parameters": count.parameters,
            "buffers": {
                name: {"read": r, "written": w, "parameter_sized": name in count.lists}
                for name, (r, w) in sorted(count.buffers.items())
            },
            "read_per_parameter": count.read / count.parameters,
            "written_per_parameter": count.written / count.parameters,
            "design_per_parameter": sum(map(sum, count.design.values())) / count.parameters,
            "rest_per_parameter": count.rest / count.parameters,
            "accesses": {f"{kind} {size}": n for (kind, size), n in sorted(count.widths.items())},
            "instructions": dict(sorted(count.classes.items())),
            "shared_read": count.shared[0],
            "shared_written": count.shared[1],
            "barriers": count.barriers,
            "seconds": round(count.seconds, 3),
        }
        for count in counts
    ]
    return json.dumps({"schema": SCHEMA, "launches": rows}, indent=1)


def off_design(counts: Sequence[Count]) -> list[str]:
    """One sentence for every argument whose bytes are not exactly the design's.

    Launches of one name within a call share a design: a mixed list takes one for each dtype.
    """
    found: dict[str, None] = {}
    for count, group in zip(counts, _groups(counts), strict=True):
        touched = {name for one in group for name in one.sized}
        for name in sorted(touched | set(count.design)):
            pairs = [one.buffers.get(name, (0, 0)) for one in group]
            moved = (sum(r for r, _ in pairs), sum(w for _, w in pairs))
            wanted = count.design.get(name, (0, 0))
            if moved != wanted:
                found[
                    f"{count.kernel} {count.dtype} {count.layout} {count.launch}: {name} moved "
                    f"{moved[0]} + {moved[1]} bytes (read + written), but should move "
                    f"{wanted[0]} + {wanted[1]}"
                ] = None
    return list(found)


def over_rest(counts: Sequence[Count]) -> list[str]:
    """One sentence for every call whose other bytes exceed the design's, from 2^20 parameters on.

    Below that the fixed costs of a launch weigh more.
    """
    calls: dict[str, float] = {}
    for count in counts:
        if count.parameters >= REST_AT:
            call = f"{count.kernel} {count.dtype} {count.layout}"
            calls[call] = calls.get(call, 0.0) + count.rest / count.parameters
    return [
        f"{call}: {rest:.4f} bytes per parameter besides the parameters themselves, but should "
        f"be at most {REST:.2f}"
        for call, rest in calls.items()
        if rest > REST
    ]


def _groups(counts: Sequence[Count]) -> list[list[Count]]:
    """For each count those of the same launch name within the same call."""

    def key(count: Count) -> tuple[str, ...]:
        return count.kernel, count.dtype, count.layout, count.launch

    groups: dict[tuple[str, ...], list[Count]] = {}
    for count in counts:
        groups.setdefault(key(count), []).append(count)
    return [groups[key(count)] for count in counts]


def _pair(count: Count, name: str) -> str:
    read, written = count.buffers[name]
    return f"{read / count.parameters:.4g}+{written / count.parameters:.4g}"


def _short(number: int) -> str:
    """A count with three digits.

    >>> _short(1234567), _short(12)
    ('1.23M', '12')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
