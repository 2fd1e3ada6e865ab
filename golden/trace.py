"""Traces: one JSON line per step after one header line; floats in hexadecimal.

Hexadecimal floats are exact and compare as text. Every string inside a step, `constants` or `start`
is such a float; integers and booleans stand for themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCHEMA = 1
Value = float | int | bool
Step = Mapping[str, Value]
TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, kw_only=True)
class Header:
    """The origin of a trace, and what was done.

    Attributes:
        name: of the trace, and of its file.
        package: whose behaviour this is.
        version: of that package.
        subject: the class or function that was run.
        command: how to record it again.
        rule: what was run, as in `golden.sequences.Situation`.
        constants: constructor arguments.
        start: state before the first step.
        steps: one letter per step, g for a clean step, o for an overflow.
        seed: of random numbers; none were drawn when it is None.
        differs: where we knowingly differ, with the id of the edge; empty when we agree.
        schema: version of this format.
    """

    name: str
    package: str
    version: str
    subject: str
    command: str
    rule: str
    constants: Mapping[str, Value]
    start: Mapping[str, Value]
    steps: str
    seed: int | None = None
    differs: str = ""
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A header and what was observed after each step."""

    header: Header
    steps: Sequence[Step] = field(default_factory=list)


def to_text(trace: Trace) -> str:
    """The file's content; equal traces give equal text."""
    head = asdict(trace.header)
    head["constants"] = _encoded(trace.header.constants)
    head["start"] = _encoded(trace.header.start)
    rows = [head, *(_encoded(step) for step in trace.steps)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def from_text(text: str, where: str) -> Trace:
    """Read a trace.

    Args:
        text: the file's content.
        where: its name, for messages.

    Raises:
        ValueError: the schema is unknown, a line is no step, or steps are missing.
    """
    try:
        head, *rows = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{where} should be JSON lines with a header, but: {error}") from error
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        got = head.get("schema") if isinstance(head, dict) else None
        raise ValueError(f"{where} has schema {got!r}, but should have {SCHEMA}; record it again")
    head["constants"], head["start"] = _decoded(head["constants"]), _decoded(head["start"])
    steps = [_decoded(row) for row in rows]
    if len(steps) != len(head["steps"]):
        raise ValueError(
            f"{where} has {len(steps)} steps, but its header announces {len(head['steps'])}"
        )
    return Trace(header=Header(**head), steps=steps)


def read(path: Path) -> Trace:
    """Read a trace from a file; see `from_text`."""
    return from_text(path.read_text(), path.name)


def write(trace: Trace, folder: Path) -> Path:
    """Write a trace under its name and return the path."""
    path = folder / f"{trace.header.name}.jsonl"
    path.write_text(to_text(trace))
    return path


def read_all(folder: Path = TRACES) -> list[Trace]:
    """All traces of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.jsonl"))]


def _encoded(row: Mapping[str, Value]) -> dict[str, str | int | bool]:
    return {key: value.hex() if isinstance(value, float) else value for key, value in row.items()}


def _decoded(row: Mapping[str, str | int | bool]) -> dict[str, Value]:
    return {
        key: float.fromhex(value) if isinstance(value, str) else value for key, value in row.items()
    }
