"""The CPU: update, norm and training against torch and DeepSpeed, turn by turn.

    python -m twinstep.benchmarks.cpu [--part NAME] [--numel N] [--rounds N] [--output FILE]

    update    AdamW on fp32 weights, with the bf16 copy of a mixed step, against torch's fused
              AdamW, which writes none; with fp32 gradients like torch's, and with bf16 ones
    offload   a whole step against DeepSpeed's sequence: see `benchmarks.offload`
    norm      norm and overflow, as shares of the rate at which the same bytes are only read
    train     steps of `scenarios train --side fast` against fp32 weights that are cast for each
              forward, clipping and fused AdamW, in fp16 with GradScaler and in bf16 without: the
              optimizer's part, and whole steps; and whether the curve of the reference is the
              same to the last bit. Forward and backward are the same function in the same dtypes:
              products in fp32. Autocast would take torch's own 16-bit products instead, which on
              a CPU take a twentieth to twice the speed, by processor and dtype

Ratios are of neighbouring rounds, with their quartiles; more than 1 is in our favour.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinstep.benchmarks import offload
from twinstep.benchmarks.offload import BETAS, DECAY, EPS, RATE, WARM_UP, compare, processor
from twinstep.benchmarks.part import Figures
from twinstep.benchmarks.stamp import report, stamp
from twinstep.fast.kernels.adam import adamw_step_
from twinstep.fast.kernels.reduce import global_norm_
from twinstep.fast.runtime.native import NUMBERS, call, instruction_set
from twinstep.scenarios import trace, train
from twinstep.scenarios.model import Shape
from twinstep.scenarios.optimizers import Wrapper
from twinstep.scenarios.plan import DTYPES, STATIC_SCALE, Plan
from twinstep.scenarios.trainers import ClassTrainer, Trainer

NUMEL = 192 * 2**20
SHAPE = Shape(width=384, layers=6)


def turns(rounds: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call in each round, one after the other; the first rounds do not count."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + WARM_UP):
        for seconds, each in zip(found, calls, strict=True):
            start = time.perf_counter()
            each()
            seconds.append(time.perf_counter() - start)
    return [seconds[WARM_UP:] for seconds in found]


def number(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A control."""
    return torch.tensor(value, dtype=dtype)


def update(numel: int, rounds: int) -> Figures:
    """Our AdamW with a copy, and torch's without one."""
    grads = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    controls = {"lr": RATE, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY}
    given: dict[str, Any] = {name: number(value) for name, value in controls.items()}
    given |= {"factor": number(1.0, torch.float32), "found_inf": number(0.0, torch.float32)}
    lists = [[torch.zeros(numel)] for _ in range(3)]
    copies = [torch.zeros(numel, dtype=torch.bfloat16)]
    weight = torch.nn.Parameter(torch.zeros(numel))
    weight.grad = grads
    theirs = torch.optim.AdamW(
        [weight], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )

    def ours(grad: Tensor) -> Callable[[], None]:
        steps = [torch.zeros((), dtype=torch.int64)]
        params, means, squares = lists
        return lambda: adamw_step_(
            params, [grad], means, squares, copies, steps, **given, bias_correction=True
        )

    single, half, other = turns(rounds, ours(grads), ours(grads.bfloat16()), theirs.step)
    return {"fp32_gradients": compare(single, other), "bf16_gradients": compare(half, other)}


def norm(numel: int, rounds: int) -> Figures:
    """Norm and overflow of each dtype, and the rate of reading."""
    found: Figures = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        grads = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
        given = {"norm": number(0.0, torch.float32), "found_inf": number(0.0, torch.float32)}
        total = torch.zeros((), dtype=torch.int64)
        words = numel * grads.element_size() // 4

        def read(grads: Tensor = grads, words: int = words, total: Tensor = total) -> None:
            row = (grads.data_ptr(), words, NUMBERS[torch.float32])
            call("twinstep_read", [row], ctypes.c_void_p(total.data_ptr()))

        def ours(grads: Tensor = grads, given: dict[str, Tensor] = given) -> None:
            global_norm_([grads], **given)

        mine, plain = turns(rounds, ours, read)
        shares = [b / a for a, b in zip(mine, plain, strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        gigabytes = numel * grads.element_size() / statistics.median(plain) / 1e9
        found[str(dtype).removeprefix("torch.")] = {
            "share_of_read_rate": round(middle, 3),
            "share_quartiles": [round(low, 3), round(high, 3)],
            "ours_ms": round(1e3 * statistics.median(mine), 1),
            "read_gb_per_s": round(gigabytes, 1),
        }
    return found


class Timed:
    """A wrapper whose steps are timed.

    Attributes:
        seconds: of the last step.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper, self.seconds = wrapper, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._wrapper, name)

    def step(self) -> None:
        """The wrapper's."""
        start = time.perf_counter()
        self._wrapper.step()
        self.seconds = time.perf_counter() - start


class TorchTrainer(Trainer):
    """The same run in torch alone: fp32 weights and casts, fused AdamW; in fp16 GradScaler."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._weights = [weight.requires_grad_() for weight in self.initial_weights()]
        given: dict[str, Any] = {"lr": plan.lr, "eps": plan.eps, "weight_decay": plan.weight_decay}
        betas = (plan.beta1, plan.beta2)
        self.optimizer = torch.optim.AdamW(self._weights, betas=betas, fused=True, **given)
        scales = plan.dtype == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=STATIC_SCALE, enabled=scales)
        self.seconds = self.norm = 0.0

    @property
    def weights(self) -> list[Tensor]:
        """The model's weights in fp32."""
        return self._weights

    def advance(self) -> trace.StepRecord:
        """Take one step, and note it."""
        scale, loss = self.scaler.get_scale(), self.learn()
        return trace.StepRecord(
            step=self.step,
            loss=loss,
            lr=self.plan.lr,
            scale=scale,
            norm=self.norm,
            skipped=not math.isfinite(self.norm),
            state=trace.digest({"weights": self._weights}),
        )

    def learn(self) -> float:
        """Take one step; the loss of its last micro-batch."""
        self.step += 1
        last = 0.0
        self.optimizer.zero_grad()
        for windows in self.micro_batches():
            low = [weight.to(DTYPES[self.plan.dtype]) for weight in self._weights]
            loss = self.loss(low, windows)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            last = float(loss.detach())
        start = time.perf_counter()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self.plan.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seconds = time.perf_counter() - start
        self.norm = float(norm)
        return last


def training(dtype: str, rounds: int) -> Figures:
    """Steps of both, and the curves of both of our sides."""
    curve = Plan(optimizer="adam", dtype=dtype, rule="static", steps=3, held_out=1, shape=SHAPE)
    plan = replace(curve, steps=rounds + WARM_UP)
    ours, theirs = ClassTrainer(plan, "fast", torch.device("cpu")), TorchTrainer(plan)
    timed = Timed(ours.wrapper)
    ours.wrapper = timed  # type: ignore[assignment]
    parts: tuple[list[float], list[float]] = ([], [])

    def ours_learns() -> None:
        ours.learn()
        parts[0].append(timed.seconds)

    def theirs_learns() -> None:
        theirs.learn()
        parts[1].append(theirs.seconds)

    whole = turns(rounds, ours_learns, theirs_learns)
    fast, reference = train.run("fast", curve), train.run("reference", curve)
    return {
        "parameters": sum(weight.numel() for weight in theirs.weights),
        "optimizer": compare(*(part[WARM_UP:] for part in parts)),
        "whole_step": compare(*whole),
        "first_difference_from_the_reference": trace.first_difference(fast, reference),
        "steps_compared": len(fast.records),
        "steps_skipped": len(fast.skipped),
    }


PARTS: dict[str, Callable[[int, int], Figures]] = {
    "update": update,
    "offload": offload.run,
    "norm": norm,
    "train": lambda _, rounds: {name: training(name, rounds) for name in ("fp16", "bf16")},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(prog="python -m twinstep.benchmarks.cpu")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--numel", type=int, default=NUMEL, help="of all but training")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}, but should be 2 or more: quartiles need two")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    figures = {**stamp(), "processor": processor(), "instructions": instruction_set()}
    figures |= {"threads": torch.get_num_threads(), "numel": options.numel}
    figures |= {"rounds": options.rounds}
    for name in options.part or PARTS:
        load = round(os.getloadavg()[0], 1)  # others beside us, too
        figures[name] = {"load": load, **PARTS[name](options.numel, options.rounds)}
    report(figures, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
