"""Outcomes of cases: one word and a reason for each, kept as JSON lines and counted in a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BAD = ("wrong result", "refused without a place", "crash")
"""Outcomes that are a defect of replay's."""

LISTED = (*BAD, "fault reported", "other error")
"""Outcomes that are listed case by case."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        outcome: "passed", "refused", ...
        reason: What was refused, the test's own words, the failing line.
        place: Line of the kernel that a refusal names.
        case: The test's name; "" until it is known.
        seconds: How long it took.
    """

    outcome: str
    reason: str = ""
    place: str = ""
    case: str = ""
    seconds: float = 0.0


def read(path: Path) -> list[Outcome]:
    """The outcomes in a file, oldest first; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def append(path: Path, outcome: Outcome) -> None:
    """Add an outcome to a file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def table(rows: Sequence[Outcome]) -> str:
    """Counts by outcome and reason, then the cases that one must look at."""
    lines = ["| outcome | reason | cases |", "| --- | --- | --- |"]
    counts = Counter((row.outcome, "" if row.outcome in LISTED else row.reason) for row in rows)
    for (outcome, reason), count in sorted(counts.items(), key=lambda x: (x[0][0], -x[1])):
        lines.append(f"| {outcome} | {reason.splitlines()[0] if reason else ''} | {count} |")
    lines += [f"{row.outcome}: {row.case}: {row.reason}" for row in rows if row.outcome in LISTED]
    return "\n".join(lines)
