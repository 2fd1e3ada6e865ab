"""Whole steps of our optimizer classes beside those of torch and DeepSpeed, on one device.

A step begins with gradients in the dtype of the group and ends with masters, moments and, where
the weights are narrow, new weights. Torch's way of mixed precision has gradients in fp32, as
autocast leaves them; its casts, its unscaling and its clipping are part of its time. DeepSpeed's
`FP16_Optimizer` brings five timers of its own; its rows show each of them beside our one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter

from twinstep.benchmarks import steps
from twinstep.benchmarks.beside.builds import cpu_adam
from twinstep.benchmarks.beside.peers import Absent, version_of
from twinstep.benchmarks.beside.subject import Shape, Subject
from twinstep.benchmarks.steps import BRAIN, FULL, HALF, HYPER, Make, Step
from twinstep.contract.timers import PhaseTimers
from twinstep.fast import FP16UnfusedOptimizer, FusedAdam, FusedLamb
from twinstep.parity.proof.peers.installed import deepspeed as deepspeed_on_cpu

SHARDED = "fp32 DTensor"
# Bytes of an element that each step must read and write: what Adam's update has, and the norm.
BYTES = {"fp32": (16, 12), SHARDED: (16, 12), "fp16": (16, 14), "bf16": (16, 14)}
DTYPES = {"fp32": FULL, SHARDED: FULL, "fp16": HALF, "bf16": BRAIN}
TIMERS = ("overflow_check", "compute_norm", "unscale_and_clip", "basic_step", "update_fp16")
FLAT = "DeepSpeed FP16_Optimizer"
Parts = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class ClassStep:
    """A step of an optimizer class.

    Attributes:
        name: as the table shows it.
        dtype: of weights and gradients.
        make: the step over some parameters.
        package: whose version stands beside the name; empty for ours.
        sharded: the parameters are DTensors.
    """

    name: str
    dtype: torch.dtype
    make: Make
    package: str = ""
    sharded: bool = False

    def version(self) -> str:
        """Name and version of its package.

        Raises:
            Absent: the package is not installed.
        """
        return version_of(self.package)


def device() -> torch.device:
    """The GPU, or the CPU, where our classes run C++ kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def steps_of(dtype: str, where: torch.device) -> tuple[list[ClassStep], list[ClassStep]]:
    """Ours, and those of others, for weights of a dtype."""
    given, on_cpu = DTYPES[dtype], where.type == "cpu"
    if dtype == SHARDED:
        both = [
            ("torch AdamW fused", steps.torch_fused),
            ("torch AdamW foreach", steps.torch_foreach),
        ]
        ours = [ClassStep("FusedAdam", given, steps.fused_adam, sharded=True)]
        return ours, [ClassStep(name, given, make, "torch", True) for name, make in both]
    table: dict[str, tuple[list[tuple[str, Make]], list[tuple[str, Make, str]]]] = {
        "fp32": (
            [("FusedAdam", steps.fused_adam), ("FusedLamb", lamb)],
            [
                ("torch AdamW fused", steps.torch_fused, "torch"),
                ("torch AdamW foreach", steps.torch_foreach, "torch"),
                ("DeepSpeedCPUAdam", deepspeed_cpu_adam, "deepspeed")
                if on_cpu
                else ("DeepSpeed FusedAdam", steps.foreign("deepspeed.ops.adam"), "deepspeed"),
                *([] if on_cpu else [("apex FusedAdam", steps.foreign("apex.optimizers"), "apex")]),
            ],
        ),
        "fp16": (
            [
                ("FP16Optimizer", steps.fp16),
                ("FP16UnfusedOptimizer", unfused),
                ("FP16UnfusedOptimizer, LAMB", steps.fp16_unfused_lamb),
            ],
            [
                ("torch AdamW fused + GradScaler", steps.torch_amp, "torch"),
                (FLAT, deepspeed_fp16, "deepspeed"),
            ],
        ),
        "bf16": (
            [("BF16Optimizer", steps.bf16)],
            [
                ("torch AdamW fused, fp32 masters", torch_masters, "torch"),
                ("DeepSpeed BF16_Optimizer", deepspeed_bf16, "deepspeed"),
            ],
        ),
    }
    mine, others = table[dtype]
    amp = {"torch AdamW fused + GradScaler": FULL}
    return (
        [ClassStep(name, given, make) for name, make in mine],
        [ClassStep(name, amp.get(name, given), make, package) for name, make, package in others],
    )


def lamb(params: list[Parameter]) -> Step:
    """Our LAMB on fp32 weights."""
    return FusedLamb(params, **HYPER).step


def unfused(params: list[Parameter]) -> Step:
    """Ours: fp16 weights, a master for each of them, a dynamic scale, clipped."""
    given: dict[str, Any] = {"dynamic_loss_scale": True, "clip_grad": 1.0, "verbose": False}
    return FP16UnfusedOptimizer(FusedAdam(params, **HYPER), **given).step


def torch_masters(params: list[Parameter]) -> Step:
    """By torch alone: fp32 masters of narrow weights, casts, norm, clip, fused AdamW, casts."""
    masters = [Parameter(param.detach().float()) for param in params]
    wide = [torch.empty_like(master) for master in masters]
    for master, grad in zip(masters, wide, strict=True):
        master.grad = grad
    optimizer = torch.optim.AdamW(masters, **HYPER, fused=True)
    weights = [param.detach() for param in params]
    values = [master.detach() for master in masters]

    def step() -> None:
        given: Any = [param.grad for param in params]
        torch._foreach_copy_(wide, given)
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_copy_(weights, values)

    return step


def deepspeed(module: str, where: torch.device) -> ModuleType:
    """A module of DeepSpeed, in a process group of one."""
    if where.type == "cpu":
        return deepspeed_on_cpu(module)
    package: Any = import_module("deepspeed")
    _one_rank(where)
    package.init_distributed(auto_mpi_discovery=False, verbose=False)
    return import_module(module)


def deepspeed_cpu_adam(params: list[Parameter]) -> Step:
    """DeepSpeed's C++ AdamW, which it compiles on first use."""
    step: Step = cpu_adam(params, **HYPER, adamw_mode=True).step
    return step


def inner(params: list[Parameter]) -> torch.optim.Optimizer:
    """Torch's fused AdamW, which DeepSpeed's wrappers hold here: its kernel moves as many bytes."""
    return torch.optim.AdamW(params, **HYPER, fused=True)


class TimedStep:
    """A step that times its own phases.

    Attributes:
        timers: that its optimizer was given.
    """

    def __init__(self, step: Step, timers: PhaseTimers) -> None:
        self._step, self.timers = step, timers
        self._before: dict[str, float] = {}

    def __call__(self) -> object:
        """Take a step."""
        self._before = self._totals()
        return self._step()

    def parts(self) -> dict[str, float]:
        """Seconds of the phases of the last step, by their names."""
        now = self._totals()
        return {f"{FLAT}: {name}": (now[name] - self._before[name]) / 1e3 for name in TIMERS}

    def _totals(self) -> dict[str, float]:
        for name in TIMERS:
            self.timers(name).collect()
        return {name: self.timers(name).total for name in TIMERS}


def deepspeed_fp16(params: list[Parameter]) -> Step:
    """DeepSpeed's flat wrapper: fp16 weights, a dynamic scale, clipped, with its five timers."""
    where = params[0].device
    cls: Any = deepspeed("deepspeed.runtime.fp16.fused_optimizer", where).FP16_Optimizer
    timers = PhaseTimers(where)
    given: dict[str, Any] = {"dynamic_loss_scale": True, "clip_grad": 1.0, "verbose": False}
    given["dynamic_loss_args"] = {"init_scale": 1, "scale_window": 10**9, "min_scale": 1}
    return TimedStep(cls(inner(params), timers=timers, **given).step, timers)


def deepspeed_bf16(params: list[Parameter]) -> Step:
    """DeepSpeed's bf16 wrapper, fp32 gradients, clipped; what `backward` does included."""
    cls: Any = deepspeed("deepspeed.runtime.bf16_optimizer", params[0].device).BF16_Optimizer
    config = SimpleNamespace(enabled=True, immediate_grad_update=False)
    group: dict[str, Any] = {"dp_process_group": dist.group.WORLD, "grad_acc_dtype": FULL}
    names = {param: str(place) for place, param in enumerate(params)}
    optimizer = cls(inner(params), names, config, clip_grad=1.0, **group)

    def step() -> None:
        optimizer.update_hp_grads(clear_lp_grads=False)
        optimizer.step()
        optimizer.clear_hp_grads()

    return step


def _one_rank(where: torch.device) -> None:
    """A process group of this process alone, where there is none."""
    if not dist.is_initialized():
        backend = "nccl" if where.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


@cache
def mesh(kind: str) -> DeviceMesh:
    """A mesh of one rank: what FSDP2 makes of parameters, and no communication."""
    _one_rank(torch.device(kind))
    return init_device_mesh(kind, (1,))


def distributed(tensors: Sequence[Tensor], where: torch.device) -> list[Tensor]:
    """DTensors sharded as FSDP2 shards them."""
    from torch.distributed.tensor import DTensor, Shard

    over, placed = mesh(where.type), [Shard(0)]
    return [DTensor.from_local(tensor, over, placed, run_check=False) for tensor in tensors]


def subject(step: ClassStep, shape: Shape, device: torch.device) -> Subject:
    """A step with parameters of its own; the gradients are given anew before every call.

    Raises:
        Absent: of a peer, its optimizer does not exist here.
    """
    random = torch.Generator(device).manual_seed(1)
    size = (shape.tensors, shape.each)

    def normal(spread: float) -> list[Tensor]:
        drawn = torch.empty(size, dtype=step.dtype, device=device)
        return list(drawn.normal_(0.0, spread, generator=random).unbind())

    def placed(values: list[Tensor]) -> list[Tensor]:
        return distributed(values, device) if step.sharded else values

    # Each weight and gradient is allocated by itself; only what gradients are copied from is one.
    params = [Parameter(tensor) for tensor in placed([row.clone() for row in normal(0.1)])]
    first = normal(0.01)
    values = [grad.clone() for grad in first]
    grads = placed(values)

    def give() -> None:
        torch._foreach_copy_(values, first)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    give()
    try:
        call = step.make(params)
    except (ImportError, AttributeError) as error:
        raise Absent(f"{type(error).__name__}: {error}") from None
    parts: Parts = call.parts if isinstance(call, TimedStep) else dict
    return Subject(call, give, device, each=True, parts=parts)
