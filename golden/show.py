"""Traces in the terminal: a table of steps, and what differs between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinstep.golden.trace import Step, Trace, Value

BARS = " ▁▂▃▄▅▆▇█"
MEANING = {
    "g": "clean",
    "b": "half gradient",
    "z": "zero gradient",
    "o": "infinity",
    "i": "-infinity",
    "n": "NaN",
    "q": "both infinities",
    "h": "squares overflow",
    "m": "in one micro-batch",
    "p": "on one rank",
    "R": "resumed",
    "X": "scale overridden",
    "L": "rate halved",
}


def lines(trace: Trace) -> list[str]:
    """A trace as text: its origin, a curve of the scale with the skipped steps, and every step."""
    header = trace.header
    said = [
        f"{header.name}: {header.subject} ({header.package} {header.version})",
        "constants: " + ", ".join(f"{k} {_number(v)}" for k, v in header.constants.items()),
    ]
    said += [f"our default differs: {header.differs}"] if header.differs else []
    scales = [row["scale"] for row in trace.steps if isinstance(row.get("scale"), float)]
    if len(scales) == len(trace.steps):
        said += [f"scale   {_curve([s for s in scales if isinstance(s, float)])}"]
    norms = [row["norm"] for row in trace.steps if isinstance(row.get("norm"), float)]
    if norms:
        said += [f"norm    {_curve([n for n in norms if isinstance(n, float)], zero=True)}"]
    said += [f"steps   {header.steps}", f"skipped {''.join(map(_skip, trace.steps))}", ""]
    names = [name for name in trace.steps[0] if name != "skipped"] if trace.steps else []
    rows = [["step", "event", *names]]
    for index, (letter, step) in enumerate(zip(header.steps, trace.steps, strict=True)):
        event = MEANING.get(letter, letter) + (", skipped" if step.get("skipped") else "")
        rows.append([str(index), event, *(_value(step[name]) for name in names)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    said += [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return said


def diff(one: Trace, other: Trace) -> list[str]:
    """Everything that differs between two traces: constants, number of steps, then every field."""
    first, second = one.header.name, other.header.name
    said = [
        f"{name}: {getattr(one.header, name)} in {first}, {getattr(other.header, name)} in {second}"
        for name in ("package", "version", "subject", "rule", "steps")
        if getattr(one.header, name) != getattr(other.header, name)
    ]
    keys = sorted(one.header.constants.keys() | other.header.constants.keys())
    for key in keys:
        left, right = one.header.constants.get(key), other.header.constants.get(key)
        said += [f"constant {key}: {left} in {first}, {right} in {second}"] if left != right else []
    if len(one.steps) != len(other.steps):
        said.append(f"{len(one.steps)} steps in {first}, {len(other.steps)} in {second}")
    for index, (left_row, right_row) in enumerate(zip(one.steps, other.steps, strict=False)):
        for name in sorted(left_row.keys() | right_row.keys()):
            mine, theirs = left_row.get(name), right_row.get(name)
            if mine != theirs:
                said.append(
                    f"step {index}, {name}: {_value(mine)} in {first}, {_value(theirs)} in {second}"
                )
    return said


def _curve(values: Sequence[float], zero: bool = False) -> str:
    """One block for each value, on a logarithmic scale; a dot where there is none."""
    levels = [math.log2(v) if 0.0 < v < math.inf else None for v in values]
    known = [level for level in levels if level is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    span = (high - low) or 1.0

    def block(level: float | None, value: float) -> str:
        if level is None:
            return "·" if zero or value == 0.0 else "∞"
        return BARS[4 if low == high else 1 + round(7 * (level - low) / span)]

    drawn = "".join(block(level, value) for level, value in zip(levels, values, strict=True))
    return f"{drawn}  {_number(values[0])} → {_number(values[-1])}" if values else ""


def _skip(step: Step) -> str:
    return "x" if step.get("skipped") or step.get("raised") else "."


def _value(value: Value | None) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{one:.6g}" for one in value)
    return "-" if value is None else _number(value)


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
