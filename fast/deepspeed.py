"""Our optimizers under DeepSpeed 0.19.8's names and signatures, positional arguments included.

Each function builds the class of `fast` that does the same; arguments that only ours have are
keywords of that class. `FusedAdam` takes the first nine arguments of apex's `FusedAdam`, too.
`from_config` reads a config. Behaviour is correct by default; `compat=Compat.deepspeed()` brings
that of 0.19.8 back.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import twinstep.fast.optimizers.fused_adam
import twinstep.fast.optimizers.fused_lamb
from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.hyper import Number
from twinstep.contract.parallel import Engine, ExpertGroups, ModelParallelUnit
from twinstep.contract.timers import Timers
from twinstep.contract.wrapper import ParamGroup
from twinstep.contract.zero import OffloadConfig
from twinstep.fast.deepspeed_config import from_config as from_config
from twinstep.fast.optimizers.bf16 import BF16Optimizer
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.scalers import LossScale, zero_loss_scale
from twinstep.fast.optimizers.zero import ZeroOptimizer


class BF16Config(Protocol):
    """The part of DeepSpeed's bf16 configuration that is asked for."""

    immediate_grad_update: bool


def FusedAdam(
    params: Iterable[Tensor] | Iterable[ParamGroup],
    lr: Number = 1e-3,
    bias_correction: bool = True,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
    *,
    compat: Compat = CORRECT,
) -> twinstep.fast.optimizers.fused_adam.FusedAdam:
    """A `fast.FusedAdam`."""
    return twinstep.fast.optimizers.fused_adam.FusedAdam(
        params,
        lr=lr,
        bias_correction=bias_correction,
        betas=betas,
        eps=eps,
        adam_w_mode=adam_w_mode,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        set_grad_none=set_grad_none,
        compat=compat,
    )


def FusedLamb(
    params: Iterable[Tensor] | Iterable[ParamGroup],
    lr: Number = 1e-3,
    bias_correction: bool = True,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: Number = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: Number = 10.0,
    min_coeff: Number = 0.01,
    amsgrad: bool = False,
    *,
    compat: Compat = CORRECT,
) -> twinstep.fast.optimizers.fused_lamb.FusedLamb:
    """A `fast.FusedLamb`."""
    return twinstep.fast.optimizers.fused_lamb.FusedLamb(
        params,
        lr=lr,
        bias_correction=bias_correction,
        betas=betas,
        eps=eps,
        eps_inside_sqrt=eps_inside_sqrt,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
        amsgrad=amsgrad,
        compat=compat,
    )


def FP16_Optimizer(
    init_optimizer: torch.optim.Optimizer,
    deepspeed: Engine | None = None,
    loss_scale_config: LossScale | None = None,
    low_precision_dtype: torch.dtype = torch.float16,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    initial_dynamic_scale: float = 2.0**32,
    dynamic_loss_args: Mapping[str, float] | None = None,
    verbose: bool = True,
    mpu: ModelParallelUnit | None = None,
    clip_grad: float = 0.0,
    fused_adam_legacy: bool = False,
    has_moe_layers: bool = False,
    timers: Timers | None = None,
    *,
    compat: Compat = CORRECT,
) -> FP16Optimizer:
    """A `fast.FP16Optimizer`; `loss_scale_config` is one of our scalers."""
    return FP16Optimizer(
        init_optimizer,
        deepspeed=deepspeed,
        loss_scale_config=loss_scale_config,
        low_precision_dtype=low_precision_dtype,
        static_loss_scale=static_loss_scale,
        dynamic_loss_scale=dynamic_loss_scale,
        initial_dynamic_scale=initial_dynamic_scale,
        dynamic_loss_args=dynamic_loss_args,
        verbose=verbose,
        mpu=mpu,
        clip_grad=clip_grad,
        fused_adam_legacy=fused_adam_legacy,
        has_moe_layers=has_moe_layers,
        timers=timers,
        compat=compat,
    )


def FP16_UnfusedOptimizer(
    init_optimizer: torch.optim.Optimizer,
    deepspeed: Engine | None = None,
    loss_scale_config: LossScale | None = None,
    low_precision_dtype: torch.dtype = torch.float16,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, float] | None = None,
    verbose: bool = True,
    mpu: ModelParallelUnit | None = None,
    clip_grad: float = 0.0,
    fused_lamb_legacy: bool = False,
    *,
    compat: Compat = CORRECT,
) -> FP16UnfusedOptimizer:
    """A `fast.FP16UnfusedOptimizer`; `loss_scale_config` is one of our scalers."""
    return FP16UnfusedOptimizer(
        init_optimizer,
        deepspeed=deepspeed,
        loss_scale_config=loss_scale_config,
        low_precision_dtype=low_precision_dtype,
        static_loss_scale=static_loss_scale,
        dynamic_loss_scale=dynamic_loss_scale,
        dynamic_loss_args=dynamic_loss_args,
        verbose=verbose,
        mpu=mpu,
        clip_grad=clip_grad,
        fused_lamb_legacy=fused_lamb_legacy,
        compat=compat,
    )


def BF16_Optimizer(
    init_optimizer: torch.optim.Optimizer,
    param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    bfloat16_config: BF16Config | None,
    mpu: ModelParallelUnit | None = None,
    clip_grad: float = 0.0,
    norm_type: float = 2.0,
    allgather_bucket_size: int = 5_000_000_000,
    dp_process_group: dist.ProcessGroup | None = None,
    timers: Timers | None = None,
    grad_acc_dtype: torch.dtype | None = None,
    has_moe_layers: bool = False,
    *,
    compat: Compat = CORRECT,
) -> BF16Optimizer:
    """A `fast.BF16Optimizer`; `timers` are never called, and accumulators are fp32 unless told."""
    del timers
    immediate = bfloat16_config is not None and bfloat16_config.immediate_grad_update
    return BF16Optimizer(
        init_optimizer,
        param_names=param_names,
        mpu=mpu,
        clip_grad=clip_grad,
        norm_type=norm_type,
        allgather_bucket_size=allgather_bucket_size,
        dp_process_group=dp_process_group,
        grad_acc_dtype=grad_acc_dtype or torch.float32,
        immediate_grad_update=immediate,
        has_moe_layers=has_moe_layers,
        compat=compat,
    )


def DeepSpeedZeroOptimizer(
    init_optimizer: torch.optim.Optimizer,
    param_names: Mapping[Tensor, str] | Mapping[nn.Parameter, str],
    timers: Timers | None,
    optimizer_params: Mapping[str, object] | None,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, float] | None = None,
    verbose: bool = True,
    contiguous_gradients: bool = True,
    reduce_bucket_size: int = 500_000_000,
    use_multi_rank_bucket_allreduce: bool = True,
    allgather_bucket_size: int = 5_000_000_000,
    dp_process_group: dist.ProcessGroup | None = None,
    expert_parallel_group: ExpertGroups | None = None,
    expert_data_parallel_group: ExpertGroups | None = None,
    reduce_scatter: bool = True,
    overlap_comm: bool = False,
    offload_optimizer_config: OffloadConfig | None = None,
    zenflow_config: object = None,
    mpu: ModelParallelUnit | None = None,
    clip_grad: float = 0.0,
    gradient_accumulation_dtype: torch.dtype = torch.float32,
    communication_data_type: torch.dtype | None = None,
    postscale_gradients: bool = True,
    gradient_predivide_factor: float = 1.0,
    gradient_average: bool = True,
    gradient_accumulation_steps: int = 1,
    ignore_unused_parameters: bool = True,
    partition_grads: bool = True,
    round_robin_gradients: bool = False,
    parameter_alignment: bool = False,
    has_moe_layers: bool = False,
    fp16_master_weights_and_gradients: bool = False,
    bf16_master_weights_and_gradients: bool = False,
    bf16_optimizer_states: bool = False,
    elastic_checkpoint: bool = False,
    check_grad_overflow: bool = True,
    compute_grad_norm: bool = True,
    *,
    compat: Compat = CORRECT,
) -> ZeroOptimizer:
    """A `fast.ZeroOptimizer`; gradients are sent in the dtype of the model unless told.

    `parameter_alignment` has no effect, and the norm is always computed.
    """
    given: dict[str, Any] = dict(locals())
    del given["parameter_alignment"], given["compute_grad_norm"]
    return ZeroOptimizer(**given)


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, float] | None,
) -> LossScale:
    """The scaler of a model's dtype: dynamic or static for fp16, a scale of 1 for others.

    Raises:
        ValueError: the scale moves and has no arguments, or one of another name.
    """
    dynamic = dtype == torch.half and dynamic_scaling
    if dynamic and dynamic_loss_args is None:
        raise ValueError(
            "dynamic_loss_args=None, but should be a dict with dynamic_scaling [CreateLossScaler]"
        )
    scale = static_loss_scale if dtype == torch.half else 1.0
    return zero_loss_scale(scale, dynamic, dynamic_loss_args, CORRECT)


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Dense tensors by dtype: fp16, fp32, fp64, bf16; no list for a dtype without any."""
    given = [tensor for tensor in tensors if tensor.layout is torch.strided]
    dtypes = (torch.half, torch.float, torch.double, torch.bfloat16)
    lists = ([tensor for tensor in given if tensor.dtype is dtype] for dtype in dtypes)
    return [found for found in lists if found]


def get_alignment_padding(tensor_list: Iterable[Tensor], alignment: int) -> int:
    """Elements that tensors end to end lack to a multiple of `alignment`."""
    return -sum(tensor.numel() for tensor in tensor_list) % alignment


def isclose(a: float, b: float, rtol: float = 1e-9, atol: float = 0.0) -> bool:
    """|a - b| <= max(rtol max(|a|, |b|), atol); false for NaN, true for equal infinities."""
    return math.isclose(a, b, rel_tol=rtol, abs_tol=atol)


def lcm(x: int, y: int) -> int:
    """Least common multiple."""
    return math.lcm(x, y)


def print_rank_msg(msg: object) -> None:
    """Print with the number of this rank, on all of them."""
    print(f"rank {dist.get_rank() if dist.is_initialized() else 0} - {msg}")
