"""Host time of a step, per class and number of tensors, beside torch's AdamW.

    python -m twinstep.benchmarks.host [--write]

Tensors lie on the CPU, hold 16 elements each, and kernels are launched by a driver that does
nothing: what is left is what the host does before a GPU could begin. Gradients are new tensors
at every step. Classes take turns in an order drawn anew for each round, so that a busy machine, and
what the one before has left in the caches, slows all of them alike; the quickest round counts, in
time of this thread. torch's AdamW has no launches to leave out on
the CPU: its arithmetic on 16 elements is in its figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from twinstep import fast
from twinstep.benchmarks.part import Figures
from twinstep.benchmarks.stamp import stamp
from twinstep.replay.triton.driver import ReplayDriver

COUNTS = (1, 10, 100, 1000, 5000)
ELEMENTS = 16
ROUNDS = 21
RESULTS = Path(__file__).resolve().parent / "results" / "host.json"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "host-cost.md"
MARKS = ("<!-- measured -->", "<!-- end -->")

Step = Callable[[], object]


class _NoLaunch:
    """A launcher that does nothing."""

    def __init__(self, src: object, metadata: object) -> None:
        del src, metadata

    def __call__(self, *args: object) -> None:
        """Launch nothing."""


class IdleDriver(ReplayDriver):
    """Replay's driver with launches that do nothing: Triton compiles and binds, nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher_cls = _NoLaunch  # type: ignore[assignment]

    def get_current_device(self) -> int:
        """An index of its own: kernels compiled here hold the launcher that does nothing."""
        return super().get_current_device() - 1


@contextmanager
def idle_launches() -> Iterator[None]:
    """Let kernels take CPU tensors and do nothing with them, inside the context."""
    config = triton.runtime.driver
    before = config._active
    config.set_active(IdleDriver())
    try:
        yield
    finally:
        config.set_active(before)


def _params(count: int, dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(torch.ones(ELEMENTS, dtype=dtype)) for _ in range(count)]


def renewed(params: list[Parameter]) -> None:
    """Give every parameter a gradient at an address of its own."""
    for param in params:
        param.grad = torch.empty(ELEMENTS, dtype=param.dtype)


def _fp16(params: list[Parameter], name: str, inside: str = "FusedAdam") -> Any:
    inner = getattr(fast, inside)(params)
    return getattr(fast, name)(inner, dynamic_loss_scale=True, clip_grad=1.0, verbose=False)


def _bf16(params: list[Parameter]) -> Any:
    names = {param: str(index) for index, param in enumerate(params)}
    return fast.BF16Optimizer(fast.FusedAdam(params), param_names=names, clip_grad=1.0)


Case = tuple[torch.dtype, Callable[[list[Parameter]], Any]]
CASES: dict[str, Case] = {
    "FusedAdam": (torch.float32, fast.FusedAdam),
    "FP16Optimizer": (torch.float16, lambda p: _fp16(p, "FP16Optimizer")),
    "FP16UnfusedOptimizer": (torch.float16, lambda p: _fp16(p, "FP16UnfusedOptimizer")),
    "FP16UnfusedOptimizer, FusedLamb": (
        torch.float16,
        lambda p: _fp16(p, "FP16UnfusedOptimizer", "FusedLamb"),
    ),
    "BF16Optimizer": (torch.bfloat16, _bf16),
    "FusedLamb": (torch.float32, fast.FusedLamb),
    "torch AdamW, fused": (torch.float32, lambda p: torch.optim.AdamW(p, fused=True)),
    "torch AdamW, foreach": (torch.float32, lambda p: torch.optim.AdamW(p, foreach=True)),
}


class Subject:
    """An optimizer and its parameters; every step finds new gradients."""

    def __init__(self, name: str, count: int) -> None:
        dtype, make = CASES[name]
        self.params = _params(count, dtype)
        self.optimizer = make(self.params)
        self.kept: list[Tensor | None] = []

    def prepare(self) -> None:
        """Renew the gradients, at other addresses than the last ones, and accumulate them."""
        fresh: list[Tensor | None] = [param.grad for param in self.params]
        renewed(self.params)
        self.kept = fresh
        if isinstance(self.optimizer, fast.BF16Optimizer):
            self.optimizer.update_hp_grads()

    def step(self) -> float:
        """Microseconds of one step, of this thread: what others do on the machine is left out."""
        begin = thread_time()
        self.optimizer.step()
        return 1e6 * (thread_time() - begin)


def measure(count: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Fewest microseconds of a step of each class, for this many tensors, turn by turn."""
    subjects = {name: Subject(name, count) for name in CASES}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order, draw = list(subjects), random.Random(count)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds + 3):
            draw.shuffle(order)
            for name in order:
                subjects[name].prepare()
                times[name].append(subjects[name].step())
    finally:
        gc.enable()
    return {name: min(each[3:]) for name, each in times.items()}


def table(found: dict[int, dict[str, float]]) -> str:
    """Microseconds per step, a row for each class, a column for each number of tensors."""
    counts = list(found)
    head = "| class | " + " | ".join(f"{count:,}" for count in counts) + " | per tensor |"
    lines = [head, "| --- |" + " ---: |" * (len(counts) + 1)]
    last = counts[-1]
    for name in found[last]:
        cells = [f"{found[count][name]:,.0f}" for count in counts]
        each = found[last][name] / last  # of the largest number
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {each:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; `--write` keeps it in the docs, and the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m twinstep.benchmarks.host", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the page and the figures")
    options = parser.parse_args(arguments)
    with idle_launches():
        found = {count: measure(count) for count in COUNTS}
    print(table(found))
    if options.write:
        load = round(os.getloadavg()[0], 1)  # of the last minute
        figures: Figures = {"stamp": stamp(), "load": load, "microseconds": found}
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(f"{before}{MARKS[0]}\n{table(found)}\n{MARKS[1]}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
