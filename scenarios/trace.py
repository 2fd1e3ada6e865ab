"""The record of a run: a header with its origin, then one JSON line per step.

A file holds one run after the other. Floats are written in hexadecimal, so that a trace read back
is the same run to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

SCHEMA = 2


class TraceUnreadable(ValueError):
    """A file that should hold a trace does not."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The origin of a trace. Runs with equal headers on one machine have equal steps."""

    side: str
    optimizer: str
    ranks: int
    accumulate: int
    dtype: str
    rule: str
    scale_window: int
    steps: int
    seed: int
    batch: int
    held_out_batches: int
    broken: str
    parameters: int
    text_sha256: str
    threads: int
    python: str
    torch: str
    machine: str
    exact_sums: bool = False
    scenario: str = "language_model"
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        step: counted from 1.
        loss: unscaled training loss before the step, mean over ranks.
        lr: learning rate of the step.
        scale: loss scale that the gradients carried.
        norm: global norm of the unscaled gradients; infinite or NaN when the step overflowed.
        skipped: whether the step was skipped.
        state: digest of everything the step wrote (`digest`).
    """

    step: int
    loss: float
    lr: float
    scale: float
    norm: float
    skipped: bool
    state: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole run; `held_out` is the loss on unseen text before the first and after the last."""

    header: Header
    records: Sequence[StepRecord]
    held_out: tuple[float, float]

    def column(self, name: str) -> list[float]:
        """One field of every step."""
        return [getattr(record, name) for record in self.records]

    @property
    def skipped(self) -> list[int]:
        """The steps that were skipped."""
        return [record.step for record in self.records if record.skipped]


def digest(state: Mapping[str, list[Tensor] | Tensor]) -> str:
    """SHA-256 over the bytes of every entry of a state, its first 16 hexadecimal digits.

    Equal digests mean equal bits, the sign of zero included. NaN payloads would count too; a step
    that would store a NaN is skipped, and a NaN norm is taken as the canonical one.
    """
    sha = hashlib.sha256()
    for name, value in state.items():
        sha.update(name.encode())
        for tensor in value if isinstance(value, list) else [value]:
            flat = tensor.detach().cpu().reshape(-1)
            canonical = flat.nan_to_num(math.nan, math.inf, -math.inf)
            sha.update((canonical if name == "norm" else flat).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


class Environment(TypedDict):
    """The header's fields about this machine."""

    threads: int
    python: str
    torch: str
    machine: str


def environment() -> Environment:
    """This machine's threads, processor and versions."""
    return {
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
    }


def write(traces: Sequence[Trace], path: Path) -> None:
    """Write runs one after the other: each is a header, steps and an end, one object a line."""
    lines: list[dict[str, object]] = []
    for trace in traces:
        end = {"end": True, "held_out": [value.hex() for value in trace.held_out]}
        lines += [asdict(trace.header), *map(hexed, trace.records), end]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[Trace]:
    """Read what `write` wrote.

    Raises:
        TraceUnreadable: the file holds no traces of this schema, or stops before an end.
    """
    try:
        traces, lines = [], []
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            lines.append(line)
            if "end" in line:
                traces.append(_trace(lines))
                lines = []
        if lines or not traces:
            raise ValueError("it stops before its end")
    except (KeyError, TypeError, ValueError) as problem:
        raise TraceUnreadable(
            f"{path} is no complete trace of schema {SCHEMA}: {problem}"
        ) from problem
    return traces


def _trace(lines: list[dict[str, Any]]) -> Trace:
    header, *steps, end = lines
    if header["schema"] != SCHEMA:
        raise ValueError(f"schema={header['schema']}, but should be {SCHEMA}")
    before, after = (float.fromhex(value) for value in end["held_out"])
    records = [unhexed(step) for step in steps]
    return Trace(header=Header(**header), records=records, held_out=(before, after))


def hexed(record: StepRecord) -> dict[str, object]:
    """A step as JSON has it: floats in hexadecimal."""
    return {k: v.hex() if isinstance(v, float) else v for k, v in asdict(record).items()}


def unhexed(line: Mapping[str, object]) -> StepRecord:
    """The step that `hexed` took apart."""
    floats = {entry.name for entry in fields(StepRecord) if entry.type == "float"}
    values = {k: float.fromhex(str(v)) if k in floats else v for k, v in line.items()}
    return StepRecord(**values)  # type: ignore[arg-type]


def first_difference(left: Trace, right: Trace) -> str | None:
    """The first step and field in which two traces differ, or None. NaN equals NaN."""
    for ours, theirs in zip(left.records, right.records, strict=False):
        for name, value in hexed(ours).items():
            other = hexed(theirs)[name]
            if value != other:
                return f"step {ours.step} {name}: {value} and {other}"
    if len(left.records) != len(right.records):
        return f"{len(left.records)} steps and {len(right.records)} steps"
    return None
