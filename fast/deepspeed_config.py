"""An optimizer, and its schedule, from a config of DeepSpeed 0.19.8.

Keys that choose the numbers of a step are followed. A key that asks for something that is missing
here is refused by name; keys of the engine alone (batch sizes, logging, monitors) are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.parallel import ModelParallelUnit, data_parallel_group
from twinstep.contract.shards import is_part
from twinstep.contract.wrapper import ParamGroup, Wrapper
from twinstep.fast.deepspeed_schedules import Schedule, schedule_of
from twinstep.fast.optimizers.bf16 import BF16Optimizer
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.zero import ZeroOptimizer

Config = dict[str, Any]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, None: None}
# Of zero_optimization: names here and there.
ZERO = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "reduce_scatter": "reduce_scatter",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
    "round_robin_gradients": "round_robin_gradients",
    "elastic_checkpoint": "elastic_checkpoint",
    "ignore_unused_parameters": "ignore_unused_parameters",
}


@dataclass(frozen=True)
class Offload:
    """`zero_optimization.offload_optimizer`."""

    device: str = "cpu"
    pin_memory: bool = False
    ratio: float = 1.0


def from_config(
    config: str | Path | Mapping[str, object],
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    params: Iterable[Tensor] | Iterable[ParamGroup] | None = None,
    dp_process_group: dist.ProcessGroup | None = None,
    mpu: ModelParallelUnit | None = None,
    averaged: bool = False,
    compat: Compat = CORRECT,
) -> tuple[torch.optim.Optimizer, Schedule | torch.optim.lr_scheduler.LRScheduler | None]:
    """An optimizer over a model and its schedule, as `deepspeed.initialize` chooses them.

    Args:
        config: path of a JSON file, or what is in it.
        model: whose weights are cast to fp16 or bf16, as the config has it, unless `optimizer` or
            `params` hold them already.
        optimizer: the inner one, instead of that of the config.
        params: parameters or groups; default: all of the model.
        dp_process_group: the ranks that train one model; None for the whole job, or for the
            data-parallel ranks of `mpu`. They begin with the weights of the first.
        mpu: the model-parallel unit.
        averaged: the loop averages gradients over ranks. Models in DistributedDataParallel or
            FSDP do it themselves, and so does `ZeroOptimizer`.
        compat: upstream behaviour to reproduce.

    Returns:
        The optimizer and the schedule; None without one.

    Raises:
        ValueError: a key asks for what is missing here, the config names no optimizer, or nothing
            would average gradients of several ranks.
        RuntimeError: there are several ranks, but torch.distributed is not initialised.
    """
    given = _read(config)
    ranks = data_parallel_group(dp_process_group, mpu)
    _refuse_missing(given)
    half, brain = _part(given, "fp16"), _part(given, "bf16")
    dtype = torch.float32
    if half.get("enabled"):
        dtype = torch.float16
    elif brain.get("enabled"):
        dtype = torch.bfloat16
    if optimizer is None and params is None:
        model.to(dtype)
    stage = int(_part(given, "zero_optimization").get("stage", 0))
    inner = optimizer
    if inner is None:
        inner = _inner(given, list(model.parameters()) if params is None else params, compat)
    if stage and isinstance(inner, FusedLamb) and not given.get("zero_allow_untested_optimizer"):
        raise ValueError(
            f"the config asks for Lamb with ZeRO stage {stage}, but should not, as in DeepSpeed, "
            "unless zero_allow_untested_optimizer is true: a trust ratio is then one for the flat "
            "partition of a rank, not one for each parameter"
        )
    clip = float(given.get("gradient_clipping", 1.0))
    accumulates = DTYPES[_part(given, "data_types").get("grad_accum_dtype")]
    brain_optimizer = dtype is torch.bfloat16 and stage == 1 and accumulates is torch.float32
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    names = {param: name for name, param in inside.named_parameters()}
    if ranks is not None:
        _join(model, ranks, averaged or (stage > 0 and not brain_optimizer))
    made: torch.optim.Optimizer
    if brain_optimizer:
        made = BF16Optimizer(
            inner,
            param_names=names,
            mpu=mpu,
            clip_grad=clip,
            allgather_bucket_size=_zero(given).get("allgather_bucket_size", 500_000_000),
            dp_process_group=ranks,
            immediate_grad_update=bool(brain.get("immediate_grad_update", False)),
            compat=compat,
        )
    elif stage:
        made = _zero_optimizer(given, inner, names, clip, dtype, ranks, mpu, compat)
    elif dtype is torch.float32:
        if "gradient_clipping" in given and clip > 0:
            raise ValueError(
                f"gradient_clipping={clip} in fp32 without ZeRO, but should be done by the loop: "
                "torch.nn.utils.clip_grad_norm_"
            )
        made = inner
    else:
        made = _half_optimizer(given, inner, half, clip, dtype, mpu, compat)
    chosen = _part(given, "scheduler")
    if not chosen:
        return made, None
    name = str(chosen.get("type"))
    return made, schedule_of(name, cast("Config", chosen.get("params", {})), made)


def _join(model: nn.Module, ranks: dist.ProcessGroup, averaged: bool) -> None:
    """Begin with the weights of the first rank, as DeepSpeed's engine does.

    Raises:
        ValueError: nothing averages gradients, as its engine does in backward.
    """
    if any(map(is_part, model.parameters())):
        return
    count = dist.get_world_size(ranks)
    replicated = any(isinstance(each, DistributedDataParallel) for each in model.modules())
    if count > 1 and not averaged and not replicated:
        raise ValueError(
            f"nothing averages the gradients of {count} ranks, but something should: put the model "
            "into torch.nn.parallel.DistributedDataParallel once it has the dtype of the config, "
            "or average them before each step, and say averaged=True [from_config]"
        )
    for param in model.parameters():
        weights = param.detach().contiguous()
        dist.broadcast(weights, dist.get_global_rank(ranks, 0), group=ranks)
        param.detach().copy_(weights)


def _read(config: str | Path | Mapping[str, object]) -> Config:
    if isinstance(config, Mapping):
        return dict(config)
    found = json.loads(Path(config).read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{config} holds a {type(found).__name__}, but should hold an object")
    return found


def _part(config: Config, key: str) -> Config:
    return cast(Config, config.get(key) or {})


def _zero(config: Config) -> Config:
    part = _part(config, "zero_optimization")
    return {ours: part[theirs] for theirs, ours in ZERO.items() if theirs in part}


def _refuse_missing(config: Config) -> None:
    """Refuse what changes numbers or placement and is missing here."""
    zero = _part(config, "zero_optimization")
    wanted = {
        "zero_optimization.stage 3": int(zero.get("stage", 0)) > 2,
        "zero_optimization.offload_param": bool(zero.get("offload_param")),
        "zero_optimization.zenflow": bool(zero.get("zenflow")),
        "fp16.auto_cast": bool(_part(config, "fp16").get("auto_cast")),
        "fp16 and bf16 at once": bool(
            _part(config, "fp16").get("enabled") and _part(config, "bf16").get("enabled")
        ),
        "torch_autocast": bool(_part(config, "torch_autocast").get("enabled")),
        "sparse_gradients": bool(config.get("sparse_gradients")),
        "amp": bool(_part(config, "amp").get("enabled")),
    }
    asked = [name for name, is_asked in wanted.items() if is_asked]
    if asked:
        raise ValueError(f"the config asks for {', '.join(asked)}, but should not: none is here")


def _inner(
    config: Config, params: Iterable[Tensor] | Iterable[ParamGroup], compat: Compat
) -> torch.optim.Optimizer:
    """The optimizer inside, chosen as DeepSpeed's engine does."""
    chosen = _part(config, "optimizer")
    if "type" not in chosen:
        raise ValueError("the config has no optimizer.type, but should, or optimizer= be given")
    name, options = str(chosen["type"]), dict(chosen.get("params") or {})
    if "max_grad_norm" in options:
        raise ValueError(
            "optimizer.params has max_grad_norm, but should not: gradient_clipping is the key"
        )
    if name.lower() in ("adam", "adamw"):
        # The name AdamW decouples whatever adam_w_mode says.
        decoupled = bool(options.pop("adam_w_mode", True)) or name.lower() == "adamw"
        if options.pop("torch_adam", False):
            torchs = torch.optim.AdamW if decoupled else torch.optim.Adam
            return torchs(params, **options)
        options.pop("fp32_optimizer_states", None)
        return FusedAdam(params, adam_w_mode=decoupled, compat=compat, **options)
    if name.lower() == "lamb":
        return FusedLamb(params, compat=compat, **options)
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer.type={name!r}, but should be Adam, AdamW, Lamb or a class of torch.optim"
        )
    made: torch.optim.Optimizer = cast(Any, kind)(params, **options)
    return made


def _static_scale(half: Config, dtype: torch.dtype) -> float:
    return float(half.get("loss_scale") or 1.0) if dtype is torch.float16 else 1.0


def _half_optimizer(
    config: Config,
    inner: torch.optim.Optimizer,
    half: Config,
    clip: float,
    dtype: torch.dtype,
    mpu: ModelParallelUnit | None,
    compat: Compat,
) -> Wrapper:
    """fp16 or bf16 without ZeRO. Hysteresis is left out: DeepSpeed's wrappers have none."""
    dynamic = dtype is torch.float16 and not half.get("loss_scale")
    constants = {
        "init_scale": 2.0 ** half.get("initial_scale_power", 16),
        "scale_window": half.get("loss_scale_window", 1000),
        "min_scale": half.get("min_loss_scale", 1),
    }
    options: Config = {
        "low_precision_dtype": dtype,
        "static_loss_scale": _static_scale(half, dtype),
        "dynamic_loss_scale": dynamic,
        "dynamic_loss_args": constants if dynamic else None,
        "mpu": mpu,
        "clip_grad": clip,
        "compat": compat,
    }
    if isinstance(inner, FusedAdam):
        return FP16Optimizer(inner, **options)
    legacy = isinstance(inner, FusedLamb)
    return FP16UnfusedOptimizer(inner, fused_lamb_legacy=legacy, **options)


def _zero_optimizer(
    config: Config,
    inner: torch.optim.Optimizer,
    names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    clip: float,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    mpu: ModelParallelUnit | None,
    compat: Compat,
) -> ZeroOptimizer:
    """ZeRO 1 and 2, whose scaler has DeepSpeed's hysteresis."""
    half, zero = _part(config, "fp16"), _part(config, "zero_optimization")
    types = _part(config, "data_types")
    overflow = _part(config, "bf16").get("check_grad_overflow", True)
    options: Config = {
        **_zero(config),
        "check_grad_overflow": dtype is not torch.float32 and bool(overflow),
        "gradient_accumulation_dtype": DTYPES[types.get("grad_accum_dtype")] or dtype,
        "static_loss_scale": _static_scale(half, dtype),
        "dynamic_loss_scale": dtype is torch.float16 and not half.get("loss_scale"),
        "partition_grads": int(zero["stage"]) == 2,
        "clip_grad": clip,
        "gradient_accumulation_steps": int(config.get("gradient_accumulation_steps", 1)),
        "postscale_gradients": not config.get("prescale_gradients", False),
        "gradient_predivide_factor": float(config.get("gradient_predivide_factor", 1.0)),
        "dp_process_group": group,
        "mpu": mpu,
        "compat": compat,
    }
    if options["dynamic_loss_scale"]:
        options["dynamic_loss_args"] = {
            "init_scale": 2.0 ** half.get("initial_scale_power", 16),
            "scale_window": half.get("loss_scale_window", 1000),
            "min_scale": half.get("min_loss_scale", 1),
            "delayed_shift": half.get("hysteresis", 2),
            "consecutive_hysteresis": half.get("consecutive_hysteresis", False),
        }
    if config.get("communication_data_type"):
        options["communication_data_type"] = DTYPES[config["communication_data_type"]]
    offload = _part(zero, "offload_optimizer")
    if offload and offload.get("device", "cpu") != "none":
        known = {
            name: offload[name] for name in ("device", "pin_memory", "ratio") if name in offload
        }
        options["offload_optimizer_config"] = Offload(**known)
    return ZeroOptimizer(inner, param_names=names, **options)
