"""Offload: one step of 64M parameters on the CPU, ours and DeepSpeed's, turn by turn.

    python -m twinstep.benchmarks.offload [--numel N] [--rounds N] [--output FILE]

Both begin with bf16 gradients of one micro-batch in the memory of the CPU, and end with masters,
moments and bf16 weights there, and gradients that are ready for the next step. What DeepSpeed
does is copied from `DeepSpeedZeroOptimizer` of 0.19.8 with `offload_optimizer`, in its own order,
by its own functions:

    norm        of the gradients in fp64; smallest and largest, for overflows
    copy        to fp32
    unscale     and clip, in place
    update      DeepSpeedCPUAdam
    weights     copied to a bf16 buffer

Ours is what `fast.optimizers.zero_offload` does: copy, exact norm, update with bf16 weights. The
decision between norm and update is left out on both sides. `step` is all of it. Beside a GPU the
copies are its work, and DeepSpeed's norm and overflow, too: `beside_a_gpu` leaves these out, and
keeps our norm. Ratios are of neighbouring rounds; more than 1 is in our favour.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinstep.benchmarks.part import Figures
from twinstep.benchmarks.stamp import report, stamp
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.optimizers.zero_offload import CPU, Offload, enter_squares
from twinstep.fast.runtime.native import instruction_set

NUMEL = 2**26
WARM_UP = 2
WITHOUT = "torch.optim.AdamW(fused=True) in DeepSpeed's sequence"
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
SCALE, LIMIT = 1.0, 1.0
Phases = dict[str, float]


class Ours:
    """The offload of our `ZeroOptimizer`."""

    def __init__(self, grads: Tensor) -> None:
        numel = grads.numel()
        self.offload = Offload(CPU, pins=False)
        self.grads, self.weights = grads, torch.zeros(numel, dtype=torch.bfloat16)
        self.master, self.reduced = torch.zeros(numel), torch.zeros(numel)
        self.moments = [torch.zeros(numel), torch.zeros(numel)]
        self.count = torch.zeros((), dtype=torch.int64)
        # What the device decides: the norm is clipped.
        self.factor = min(1.0, LIMIT / float(grads.float().norm()))

    def step(self, phase: Callable[[str], None]) -> None:
        """One step; calls `phase` at the end of each."""
        self.offload.add(self.reduced, 0, self.grads)
        self.offload.end_round()
        phase("gradients")
        enter_squares([self.offload.gradients(self.reduced)], [], new_limbs(CPU))
        phase("norm")
        lists = [self.master, self.reduced, *self.moments]
        hyper = [RATE, *BETAS, EPS, DECAY, self.factor]
        flags = {"bias_correction": True, "decoupled": True}
        self.offload.update(lists, self.weights, self.count, hyper, **flags)
        self.offload.clear([self.reduced])
        phase("update")


class Theirs:
    """DeepSpeed's sequence; without its C++ optimizer torch's fused one."""

    def __init__(self, grads: Tensor, *, cpu_adam: bool) -> None:
        numel = grads.numel()
        self.grads, self.weights = grads, torch.zeros(numel, dtype=torch.bfloat16)
        self.master = torch.nn.Parameter(torch.zeros(numel))
        self.master.grad = torch.zeros(numel)
        given: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        if cpu_adam:
            made = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            self.optimizer = made([self.master], **given)
            self.overflows = importlib.import_module("deepspeed.runtime.utils").has_inf_or_nan
        else:
            self.optimizer = torch.optim.AdamW([self.master], **given, fused=True)
            self.overflows = lambda x: ~(torch.isfinite(x.amax()) & torch.isfinite(x.amin()))

    @torch.no_grad()
    def step(self, phase: Callable[[str], None]) -> None:
        """One step; calls `phase` at the end of each."""
        sums = self.master.grad
        assert sums is not None
        norm = self.grads.to(torch.float64).norm(2)
        if self.overflows(self.grads):
            raise ValueError("the gradients overflow")
        phase("norm")
        sums.copy_(self.grads.to(torch.float32))
        phase("gradients")
        clip = torch.clamp((norm.float() / SCALE + 1e-6) / LIMIT, min=1.0)
        sums.mul_(1.0 / (clip * SCALE))
        phase("unscale")
        self.optimizer.step()
        phase("update")
        self.weights.copy_(self.master.data)
        phase("weights")


def timed(step: Callable[[Callable[[str], None]], None]) -> Phases:
    """Seconds of each phase of a step."""
    found: Phases = {}
    last = time.perf_counter()

    def phase(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        found[name], last = now - last, now

    step(phase)
    return found


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    """Medians in milliseconds, and the median of the ratios of neighbours with its quartiles."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "ours_ms": round(1e3 * statistics.median(ours), 1),
        "theirs_ms": round(1e3 * statistics.median(theirs), 1),
    }


def run(numel: int = NUMEL, rounds: int = 15) -> Figures:
    """Time both, turn by turn."""
    grads = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    known = find_spec("deepspeed") is not None
    ours, theirs = Ours(grads), Theirs(grads, cpu_adam=known)
    found: tuple[list[Phases], list[Phases]] = ([], [])
    for _ in range(rounds + WARM_UP):
        for rows, step in zip(found, (ours.step, theirs.step), strict=True):
            rows.append(timed(step))
    mine, others = (rows[WARM_UP:] for rows in found)
    return {
        "numel": numel,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # others beside us, too
        "instructions": instruction_set(),
        "theirs": f"deepspeed {version('deepspeed')}" if known else WITHOUT,
        "step": compare(totals(mine), totals(others)),
        "beside_a_gpu": compare(totals(mine, "gradients"), totals(others, "gradients", "norm")),
        "phases_ms": {"ours": medians(mine), "theirs": medians(others)},
    }


def totals(rows: Sequence[Phases], *without: str) -> list[float]:
    """Seconds of each round, without some of its phases."""
    return [sum(row.values()) - sum(row[name] for name in without) for row in rows]


def medians(rows: Sequence[Phases]) -> Figures:
    """Medians of each phase in milliseconds."""
    return {name: round(1e3 * statistics.median(row[name] for row in rows), 1) for name in rows[0]}


def processor() -> str:
    """Model of the processor, as Linux names it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(prog="python -m twinstep.benchmarks.offload")
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    figures = {**stamp(), "processor": processor(), **run(options.numel, options.rounds)}
    report(figures, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
