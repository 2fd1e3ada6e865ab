"""Running probes and comparing what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parity.replay.conformance.probe import SLOT, Probe, Result
from parity.replay.dtypes import Array, width
from parity.replay.launch import run_ptx
from parity.replay.meaning import FORMATS

VERSION, TARGET = "8.8", "sm_100a"


@dataclass
class Row:
    """The outcome for one opcode form."""

    form: str
    cases: int = 0
    mismatches: int = 0
    first: str = ""

    def add(self, other: Row) -> None:
        """Take another outcome of the same form in."""
        self.cases += other.cases
        self.mismatches += other.mismatches
        self.first = self.first or other.first


Execute = Callable[[Probe], Array]
"""Runs a probe and gives its result buffer."""


def on_replay(probe: Probe) -> Array:
    """Execute on replay; the result buffer."""
    inputs = [torch.empty(x.nbytes, dtype=torch.uint8) for x in probe.inputs]
    for tensor, x in zip(inputs, probe.inputs, strict=True):
        tensor.numpy()[:] = x.view(np.uint8)
    out = torch.zeros(max(len(probe.results), 1) * probe.count * SLOT, dtype=torch.uint8)
    grid = (probe.count // probe.threads,)
    bag = [probe.bag] if probe.bag else []
    run_ptx(probe.text(VERSION, TARGET), "probe", grid, (probe.threads,), [*inputs, out, *bag])
    return out.numpy()


def rows(probes: Iterable[Probe], execute: Execute = on_replay) -> dict[str, Row]:
    """Run probes; outcomes by form."""
    found: dict[str, Row] = {}
    for probe in probes:
        for row in compared(probe, execute(probe)):
            found.setdefault(row.form, Row(row.form)).add(row)
    return found


def compared(probe: Probe, out: Array) -> Iterator[Row]:
    """One row for each result of a probe."""
    block = probe.count * SLOT
    for place, result in enumerate(probe.results):
        mine = out[place * block : (place + 1) * block].view(np.uint64)
        mask = (1 << (8 * width(result.kind))) - 1
        yield _row(probe, result, (mine & np.uint64(mask)).tolist())


def _row(probe: Probe, result: Result, got: list[int]) -> Row:
    row = Row(result.form)
    for index, (found, wanted) in enumerate(zip(got, result.wanted, strict=True)):
        if wanted is None:
            continue
        row.cases += 1
        if same(result.kind, found, wanted):
            continue
        row.mismatches += 1
        if not row.first:
            given = ", ".join(hex(int(x[index])) for x in probe.inputs if len(x) == len(got))
            row.first = f"of {given}: {found:#x}, should be {wanted:#x}"
    return row


def same(kind: str, a: int, b: int) -> bool:
    """Whether two patterns are equal, NaN payloads apart; halves of packed floats one by one."""
    if kind.endswith("x2"):
        half, bits = kind[:-2], 4 * width(kind)
        mask = (1 << bits) - 1
        return same(half, a & mask, b & mask) and same(half, a >> bits, b >> bits)
    return a == b or (is_nan(kind, a) and is_nan(kind, b))


def is_nan(kind: str, bits: int) -> bool:
    """Whether a pattern is a NaN of a scalar float type."""
    if kind not in FORMATS:
        return False
    exponent, fraction = FORMATS[kind]
    infinity = ((1 << exponent) - 1) << fraction
    return bits & ((1 << (exponent + fraction)) - 1) > infinity
