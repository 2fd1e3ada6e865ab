"""Traces: one JSON line per step after one header line; floats in hexadecimal.

Hexadecimal floats are exact and compare as text. Every string inside a step, `constants` or `start`
is such a float; integers and booleans are themselves, and a step may hold lists of floats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCHEMA = 1
Constant = float | int | bool
Value = Constant | tuple[float, ...]
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
        steps: one letter per step, as in `golden.sequences`.
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
    constants: Mapping[str, Constant]
    start: Mapping[str, Constant]
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
    head["constants"], head["start"] = _singles(head["constants"]), _singles(head["start"])
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


def digest(trace: Trace) -> str:
    """SHA-256 of a trace without its package's version, in hexadecimal."""
    return hashlib.sha256("\n".join(line_digests(to_text(trace))).encode()).hexdigest()


def line_digests(text: str) -> list[str]:
    """The first 8 digits of each line's SHA-256; the header's is taken without the version.

    Raises:
        ValueError: the first line is no header.
    """
    head, *rows = text.splitlines() or [""]
    try:
        header = {**json.loads(head), "version": ""}
    except (TypeError, ValueError) as error:
        raise ValueError(f"its first line should be a header, but: {error}") from error
    lines = [json.dumps(header), *rows]
    return [hashlib.sha256(line.encode()).hexdigest()[:8] for line in lines]


def _encoded(row: Mapping[str, Value]) -> dict[str, object]:
    return {key: _written(value) for key, value in row.items()}


def _written(value: Value) -> object:
    if isinstance(value, float):
        return value.hex()
    return [one.hex() for one in value] if isinstance(value, tuple) else value


def _decoded(row: Mapping[str, object]) -> dict[str, Value]:
    return {
        key: tuple(map(float.fromhex, value)) if isinstance(value, list) else _single(value)
        for key, value in row.items()
    }


def _singles(row: Mapping[str, object]) -> dict[str, Constant]:
    return {key: _single(value) for key, value in row.items()}


def _single(value: object) -> Constant:
    if isinstance(value, str):
        return float.fromhex(value)
    if not isinstance(value, bool | int):
        raise ValueError(f"{value!r} should be a number")
    return value
