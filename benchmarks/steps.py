"""Whole steps of our classes and of peers, turn by turn on one GPU.

A few large tensors are bound by memory, a thousand small ones by the host. Both are timed on the
device between two events, and on the host until the call returns; nothing waits in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.benchmarks.part import Figures
from twinstep.fast import BF16Optimizer, FP16Optimizer, FP16UnfusedOptimizer, FusedAdam, FusedLamb
from twinstep.fast.runtime.dispatch import executes_cpu_tensors

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
SHAPES = {"large": (100, 2**19), "small": (1000, 64)}  # tensors, elements of each
ROUNDS = 21
WARM_UP = 4
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Step = Callable[[], object]
Make = Callable[[list[Parameter]], Step]


def fused_adam(params: list[Parameter]) -> Step:
    """Ours on fp32 weights."""
    return FusedAdam(params, **HYPER).step


def fp16(params: list[Parameter]) -> Step:
    """Ours: fp16 weights, flat masters, a dynamic scale, clipped."""
    inside = FusedAdam(params, **HYPER)
    return FP16Optimizer(inside, dynamic_loss_scale=True, clip_grad=1.0, verbose=False).step


def fp16_unfused_lamb(params: list[Parameter]) -> Step:
    """Ours: the same with LAMB and a master for each weight."""
    inside = FusedLamb(params, **HYPER)
    given: dict[str, Any] = {"dynamic_loss_scale": True, "clip_grad": 1.0, "verbose": False}
    return FP16UnfusedOptimizer(inside, **given).step


def bf16(params: list[Parameter]) -> Step:
    """Ours: bf16 weights, fp32 gradients, clipped; what `backward` does with gradients included."""
    names = {param: str(place) for place, param in enumerate(params)}
    optimizer = BF16Optimizer(FusedAdam(params, **HYPER), param_names=names, clip_grad=1.0)

    def step() -> None:
        optimizer.update_hp_grads()
        optimizer.step()
        optimizer.clear_hp_grads()

    return step


def torch_fused(params: list[Parameter]) -> Step:
    """torch.optim.AdamW on fp32 weights, one kernel for a few hundred tensors."""
    return torch.optim.AdamW(params, **HYPER, fused=True).step


def torch_foreach(params: list[Parameter]) -> Step:
    """torch.optim.AdamW on fp32 weights, operator by operator over all tensors."""
    return torch.optim.AdamW(params, **HYPER, foreach=True).step


def torch_amp(params: list[Parameter]) -> Step:
    """Mixed precision by torch: unscale, norm, clip, fused AdamW, new scale, fp16 copies."""
    optimizer = torch.optim.AdamW(params, **HYPER, fused=True)
    scaler = torch.amp.GradScaler(params[0].device.type, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device=params[0].device))
    copies = [param.detach().to(HALF) for param in params]

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(copies, [param.detach() for param in params])

    return step


def foreign(module: str) -> Make:
    """FusedAdam of another project, which is built already."""

    def make(params: list[Parameter]) -> Step:
        cls: Any = import_module(module).FusedAdam
        step: Step = cls(params, **HYPER, adam_w_mode=True).step
        return step

    return make


# Name -> dtype of weights and gradients, and what makes the step.
STEPS: dict[str, tuple[torch.dtype, Make]] = {
    "FusedAdam": (FULL, fused_adam),
    "torch AdamW fused": (FULL, torch_fused),
    "torch AdamW foreach": (FULL, torch_foreach),
    "FP16Optimizer": (HALF, fp16),
    "torch amp": (FULL, torch_amp),
    "FP16UnfusedOptimizer, LAMB": (HALF, fp16_unfused_lamb),
    "BF16Optimizer": (BRAIN, bf16),
}
FOREIGN = {"apex FusedAdam": "apex.optimizers", "DeepSpeed FusedAdam": "deepspeed.ops.adam"}


def known() -> dict[str, tuple[torch.dtype, Make]]:
    """Ours, torch's, and those of other projects that are installed here."""
    there = {name: home for name, home in FOREIGN.items() if find_spec(home.split(".")[0])}
    return {**STEPS, **{name: (FULL, foreign(home)) for name, home in there.items()}}


def measured(device: torch.device) -> Iterator[tuple[str, Figures]]:
    """Figures of every step, by shape of the model; what cannot run is named with the reason."""
    for shape, (count, numel) in SHAPES.items():
        ready: dict[str, Subject] = {}
        for name, (dtype, make) in known().items():
            try:
                ready[name] = Subject(make, [numel] * count, dtype, device)
            except Exception as error:  # a peer's build, or its kernels
                yield f"{name}, {shape}", {"absent": f"{type(error).__name__}: {error}"}
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
        for _ in range(WARM_UP + ROUNDS):
            for name, subject in ready.items():
                rounds[name].append(subject.timed())
        for name, subject in ready.items():
            yield f"{name}, {shape}", figures(rounds[name][WARM_UP:], subject, count)


class Subject:
    """A step with parameters and gradients of its own."""

    def __init__(
        self, make: Make, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        def normal(size: int, spread: float) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(0.0, spread)

        self.params = [Parameter(normal(size, 0.1)) for size in sizes]
        self.grads = [normal(size, 0.01) for size in sizes]
        self.give()
        self.step = make(self.params)
        self.step()

    def give(self) -> None:
        """Give the parameters their gradients, which ours drop as they use them."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def timed(self) -> tuple[float, float]:
        """Milliseconds on the device, and on the host until the call returned."""
        self.give()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        self.step()
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)), 1e3 * host

    def launches(self) -> int:
        """Kernels on the device in one step; copies and fills of the driver are none."""
        self.give()
        if executes_cpu_tensors():
            from twinstep.replay import launches

            with launches() as log:
                self.step()
            return len(log)
        device = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[device]) as profile:
            self.step()
            torch.cuda.synchronize()
        ran = [event for event in profile.events() or () if "CUDA" in str(event.device_type)]
        return sum(not event.name.startswith("Mem") for event in ran)


def figures(rounds: Sequence[tuple[float, float]], subject: Subject, tensors: int) -> Figures:
    """Medians: the step from call to end, the call alone, and that for each tensor."""
    both, host = (statistics.median(row[place] for row in rounds) for place in (0, 1))
    return {
        "step_ms": round(both, 4),
        "host_ms": round(host, 4),
        "host_us_per_tensor": round(1e3 * host / tensors, 3),
        "launches": subject.launches(),
        "tensors": tensors,
        "elements": sum(param.numel() for param in subject.params),
    }
