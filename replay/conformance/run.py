"""Runs probes and compares what they leave in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from twinstep.replay.conformance.probe import SLOT, Probe, Result
from twinstep.replay.cuda.driver import Loaded
from twinstep.replay.dtypes import Array, width
from twinstep.replay.isa.documented import documented
from twinstep.replay.launch.run import run_ptx
from twinstep.replay.spec.floats import FORMATS, decode

VERSION, TARGET = "8.8", "sm_100a"
CUDA_VERSION = "8.8"
"""PTX ISA of the text; its 256-bit accesses and fp32 pairs need that one."""


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


def on_cuda(probe: Probe) -> Array:
    """Execute on the GPU, the text compiled by the CUDA driver; the result buffer."""
    loaded = Loaded(probe.text(CUDA_VERSION, cuda_target()))
    inputs = [torch.from_numpy(x.view(np.uint8).reshape(-1)).cuda() for x in probe.inputs]
    size = max(len(probe.results), 1) * probe.count * SLOT
    out = torch.zeros(size, dtype=torch.uint8, device="cuda")
    bag = [probe.bag] if probe.bag else []
    loaded.launch("probe", probe.count // probe.threads, probe.threads, [*inputs, out, *bag])
    loaded.unload()
    return np.asarray(out.cpu().numpy())


def cuda_target() -> str:
    """The PTX target of the GPU at hand."""
    return "sm_100a" if capability() >= 100 else "sm_90a"


def capability() -> int:
    """Compute capability of the GPU at hand, times ten."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def rows(
    probes: Iterable[Probe], execute: Execute = on_replay, exactly: bool = True
) -> dict[str, Row]:
    """Run probes; outcomes by form.

    Args:
        probes: What to run.
        execute: Where.
        exactly: False allows approximate instructions their documented error.
    """
    found: dict[str, Row] = {}
    for probe in probes:
        for row in compared(probe, execute(probe), exactly):
            found.setdefault(row.form, Row(row.form)).add(row)
    return found


def compared(probe: Probe, out: Array, exactly: bool = True) -> Iterator[Row]:
    """One row for each result of a probe."""
    block = probe.count * SLOT
    for place, result in enumerate(probe.results):
        mine = out[place * block : (place + 1) * block].view(np.uint64)
        mask = (1 << (8 * width(result.kind))) - 1
        yield _row(probe, result, (mine & np.uint64(mask)).tolist(), exactly)


def _row(probe: Probe, result: Result, got: list[int], exactly: bool) -> Row:
    row = Row(result.form)
    divisor = 1 if result.form.startswith("div.") else 0
    operands = probe.inputs[divisor] if result.approximate and not exactly else None
    for index, (found, wanted) in enumerate(zip(got, result.wanted, strict=True)):
        if wanted is None:
            continue
        row.cases += 1
        if found == wanted or same(result.kind, found, wanted):
            continue
        if operands is not None and near(result, int(operands[index]), found, wanted):
            continue
        row.mismatches += 1
        if not row.first:
            given = ", ".join(hex(int(x[index])) for x in probe.inputs if len(x) == len(got))
            row.first = f"of {given}: {found:#x}, should be {wanted:#x}"
    return row


def same(kind: str, a: int, b: int) -> bool:
    """True if two patterns are equal, NaN payloads apart; halves of packed floats one by one."""
    if kind.endswith("x2"):
        half, bits = kind[:-2], 4 * width(kind)
        mask = (1 << bits) - 1
        return same(half, a & mask, b & mask) and same(half, a >> bits, b >> bits)
    return a == b or (is_nan(kind, a) and is_nan(kind, b))


def near(result: Result, operand: int, found: int, wanted: int) -> bool:
    """True if an approximate result is within its documented error, or none is documented."""
    kind, charge = result.kind, result.form.replace(".ftz", "").removesuffix("x2")
    if kind.endswith("x2"):
        half = Result(result.form, kind[:-2], [], True)
        pairs = [
            (operand >> s & 0xFFFF, found >> s & 0xFFFF, wanted >> s & 0xFFFF) for s in (0, 16)
        ]
        return all(same(half.kind, f, w) or near(half, o, f, w) for o, f, w in pairs)
    x, got, right = decode(operand, kind), decode(found, kind), decode(wanted, kind)
    if x.special or got.special or right.special:
        return False
    row = documented(charge, float(x.size))
    if row is None:
        return True
    exponent = max(wanted & ~sign_of(kind), 1 << FORMATS[kind][1]) >> FORMATS[kind][1]
    bias = (1 << (FORMATS[kind][0] - 1)) - 1
    ulp = 2.0 ** (exponent - bias - FORMATS[kind][1])
    # The value that we compare with is rounded itself, by half an ulp.
    allowed = (row.ulp + 0.5) * ulp + row.relative * float(right.size) + row.absolute
    return abs(float(got.value - right.value)) <= allowed


def sign_of(kind: str) -> int:
    """The sign bit of a float type."""
    return 1 << sum(FORMATS[kind])


def is_nan(kind: str, bits: int) -> bool:
    """True if a pattern is a NaN of a scalar float type."""
    return kind in FORMATS and decode(bits, kind).special == "nan"
