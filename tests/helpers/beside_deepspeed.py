"""Configs of DeepSpeed on the ranks of a job: its engine and `from_config`, step by step.

    torchrun --nproc-per-node 2 -m tests.helpers.beside_deepspeed

Each rank has weights and gradients of its own. Rank 0 prints one line of JSON: by name of a config,
what every rank has of both after each step, as weights and whether it was skipped.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from twinstep.contract.compat import Compat
from twinstep.fast.deepspeed import from_config
from twinstep.parity.cases.fixed_inputs import bits

HALF = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
BRAIN, SUMS = {"bf16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"fp16 stage {n}": {**HALF, "zero_optimization": {"stage": n}} for n in (1, 2)},
    **{f"bf16 stage {n}": {**BRAIN, "zero_optimization": {"stage": n}} for n in (1, 2)},
    "fp32 stage 2": {"zero_optimization": {"stage": 2}},
    "bf16 stage 1, sums in fp32": {**BRAIN, **SUMS, "zero_optimization": {"stage": 1}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1}},
    "bf16": BRAIN,
    "fp32": {},
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5, "torch_adam": True}}
# Of one rank each; 3e38 has a square that is past fp32.
EVENTS = (1.0, float("inf"), -0.5, 3e38, float("nan"), 2.0)


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A config that both read; no clipping, whose norm is another sum in DeepSpeed."""
    size = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    return {**config, **size, "optimizer": OPTIMIZER, "gradient_clipping": 0.0}


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    """Of the model."""
    if "fp16" in config:
        return torch.float16
    return torch.bfloat16 if "bf16" in config else torch.float32


def model_of(config: dict[str, Any]) -> nn.Linear:
    """Weights that differ from rank to rank."""
    torch.manual_seed(dist.get_rank())
    return nn.Linear(5, 3).to(dtype_of(config))


def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    """A loss whose gradients differ from rank to rank; the event is on one of them."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    rows = torch.randn(3, 5, generator=generator).to(dtype)
    factor = EVENTS[step] if step % 2 == dist.get_rank() else 1.0
    made: Tensor = model(rows)
    return (made.float() * factor).sum()


def seen(model: nn.Module, skipped: object) -> list[object]:
    """Weights, and whether the step was skipped."""
    return [[bits(param.detach()) for param in model.parameters()], bool(skipped)]


def steps(config: dict[str, Any], step: Callable[[int], list[object]]) -> list[object]:
    """All steps; the first one alone where nothing looks for overflows."""
    return [step(number) for number in range(len(EVENTS) if config else 1)]


def theirs(config: dict[str, Any]) -> list[object]:
    """DeepSpeed's engine."""
    model, dtype = model_of(config), dtype_of(config)
    initialize = import_module("deepspeed").initialize
    engine, *_ = initialize(model=model, config=completed(config))

    def step(number: int) -> list[object]:
        engine.backward(loss_of(engine, number, dtype))
        engine.step()
        return seen(model, getattr(engine.optimizer, "overflow", False))

    found = steps(config, step)
    engine.destroy()
    return found


def ours(config: dict[str, Any]) -> list[object]:
    """`from_config`; DistributedDataParallel where ZeRO does not average."""
    model, dtype = model_of(config), dtype_of(config)
    reduced = "zero_optimization" in config and config.get("data_types") is None
    outer = model if reduced else DistributedDataParallel(model)
    compat = Compat.deepspeed()
    optimizer: Any = from_config(completed(config), outer, compat=compat)[0]

    def step(number: int) -> list[object]:
        backward = getattr(optimizer, "backward", torch.autograd.backward)
        backward(loss_of(outer, number, dtype))
        optimizer.step()
        optimizer.zero_grad()
        return seen(model, getattr(optimizer, "overflow", False))

    return steps(config, step)


def main() -> None:
    """Run all configs on both; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Its engine refuses fp16 without a GPU, where its steps work.
    device = import_module("deepspeed.accelerator").get_accelerator()
    vars(device)["is_fp16_supported"] = lambda: True
    found = {name: [theirs(config), ours(config)] for name, config in CONFIGS.items()}
    rows: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, found)
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    gc.collect()
    os._exit(0)  # the engine's groups would be waited for


if __name__ == "__main__":
    main()
