"""The optimizer classes of both sides by dtype, with the interface that a training loop needs.

| dtype | around "adam" | around "lamb" |
| --- | --- | --- |
| fp16 | FP16Optimizer(FusedAdam) | FP16UnfusedOptimizer(FusedLamb) |
| bf16 | BF16Optimizer(FusedAdam) | FP16UnfusedOptimizer(FusedLamb), without loss scaling |
| fp32 | FusedAdam, torch clips | FusedLamb, torch clips |

The fp32 rows are the baseline: nothing of ours stands between the loop and the optimizer. "zero1"
and "zero2" are ZeroOptimizer(FusedAdam) in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.fast.optimizers.bf16 import BF16Optimizer as FastBF16Optimizer
from twinstep.fast.optimizers.fp16 import FP16Optimizer as FastFP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import (
    FP16UnfusedOptimizer as FastFP16UnfusedOptimizer,
)
from twinstep.fast.optimizers.fused_adam import FusedAdam as FastFusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb as FastFusedLamb
from twinstep.fast.optimizers.scalers import DynamicLossScale as FastDynamicLossScale
from twinstep.fast.optimizers.zero import ZeroOptimizer as FastZeroOptimizer
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.scalers import DynamicLossScale
from twinstep.reference.optimizers.zero import ZeroOptimizer
from twinstep.scenarios.plan import DTYPES, ZERO, Plan

BUCKET = 2**16  # elements; several buckets go while backward runs
Saved = Mapping[str, object]
Build = Callable[..., torch.optim.Optimizer]


class Classes(NamedTuple):
    """The optimizer classes of one side."""

    adam: Build
    lamb: Build
    fp16: Build
    unfused: Build
    bf16: Build
    zero: Build
    scaler: Callable[..., object]


CLASSES = {
    "reference": Classes(
        FusedAdam,
        FusedLamb,
        FP16Optimizer,
        FP16UnfusedOptimizer,
        BF16Optimizer,
        ZeroOptimizer,
        DynamicLossScale,
    ),
    "fast": Classes(
        FastFusedAdam,
        FastFusedLamb,
        FastFP16Optimizer,
        FastFP16UnfusedOptimizer,
        FastBF16Optimizer,
        FastZeroOptimizer,
        FastDynamicLossScale,
    ),
}
ZERO_CLASSES = (ZeroOptimizer, FastZeroOptimizer)
SHARDED = (BF16Optimizer, FastBF16Optimizer, *ZERO_CLASSES)


class Wrapper(Protocol):
    """The part of an optimizer of fp16 or bf16 models that a training loop needs.

    Those of fp16 also have a `loss_scale`.

    Attributes:
        overflow: whether the last step was skipped.
    """

    overflow: bool

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, scaled if need be, to those before it."""

    def step(self) -> object:
        """Update the weights, or skip the step."""

    def get_global_norm(self) -> float:
        """Norm of the last step's unscaled gradients, before clipping."""


class Clipped:
    """An optimizer on the weights themselves, as a `Wrapper`; torch clips the gradients."""

    overflow = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], max_norm: float
    ) -> None:
        self._optimizer, self._weights, self._max_norm = optimizer, weights, max_norm
        self._norm = 0.0

    def backward(self, loss: Tensor) -> None:
        """Torch's own."""
        torch.autograd.backward(loss)

    def step(self) -> None:
        """Clip, then update."""
        self._norm = float(torch.nn.utils.clip_grad_norm_(self._weights, self._max_norm))
        self._optimizer.step()

    def get_global_norm(self) -> float:
        """As torch has it."""
        return self._norm


def optimizer_of(
    side: str,
    plan: Plan,
    names: Sequence[str],
    weights: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.optim.Optimizer, Wrapper]:
    """The optimizer of one side that a plan asks for, around the model's weights.

    Args:
        side: "reference" or "fast".
        plan: of a run with an optimizer class.
        names: of the weights.
        weights: leaves that require gradients, in the plan's dtype; written by steps.
        group: ranks over which BF16Optimizer and ZeroOptimizer split masters and moments.

    Returns:
        The optimizer for learning-rate schedules and checkpoints, and what takes the steps: the
        same object, but where torch clips.
    """
    classes = CLASSES[side]
    build = classes.lamb if plan.optimizer == "lamb" else classes.adam
    inner = build(
        list(weights),
        lr=plan.lr,
        betas=(plan.beta1, plan.beta2),
        eps=plan.eps,
        weight_decay=plan.weight_decay,
    )
    named = dict(zip(weights, names, strict=True))
    if plan.optimizer in ZERO:
        return _zero(classes, plan, inner, named, group)
    if plan.dtype == "fp32" or plan.broken == "no-masters":
        return inner, Clipped(inner, weights, plan.max_norm)
    if plan.optimizer == "adam" and plan.dtype == "bf16" and not plan.as_deepspeed:
        optimizer = classes.bf16(
            inner, param_names=named, clip_grad=plan.max_norm, dp_process_group=group
        )
    else:
        flat = plan.optimizer == "adam" and not plan.as_deepspeed
        wrap = classes.fp16 if flat else classes.unfused
        optimizer = wrap(
            inner,
            low_precision_dtype=DTYPES[plan.dtype],
            clip_grad=plan.max_norm,
            verbose=False,
            compat=Compat.deepspeed() if plan.as_deepspeed else CORRECT,
            **_scaling(classes, plan),
        )
    return optimizer, cast(Wrapper, optimizer)


def _zero(
    classes: Classes,
    plan: Plan,
    inner: torch.optim.Optimizer,
    named: Mapping[Tensor, str],
    group: dist.ProcessGroup | None,
) -> tuple[torch.optim.Optimizer, Wrapper]:
    """A `ZeroOptimizer`; losses are parts of the mean, so that gradients of ranks are added up."""
    optimizer = classes.zero(
        inner,
        param_names=named,
        partition_grads=plan.optimizer == "zero2",
        gradient_average=False,
        communication_data_type=torch.float32 if plan.exact_sums else None,
        reduce_bucket_size=BUCKET,
        dp_process_group=group,
        clip_grad=plan.max_norm,
        offload_optimizer_config=SimpleNamespace(device="cpu") if plan.offload else None,
        verbose=False,
        **_zero_scaling(plan),
    )
    # Traces read moments before the first step that is not skipped, too.
    cast(ZeroOptimizer, optimizer).initialize_optimizer_states()
    return optimizer, cast(Wrapper, optimizer)


def loss_scale_of(wrapper: Wrapper) -> float:
    """The loss scale in force; 1 where there is none."""
    return float(getattr(wrapper, "loss_scale", 1.0))


def accumulated(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that ranks have to add up before a step: of one dtype, written in place."""
    if isinstance(optimizer, ZERO_CLASSES):
        return []  # it does so itself
    if isinstance(optimizer, BF16Optimizer | FastBF16Optimizer):
        return optimizer.get_grads_for_reduction()[0]
    return [cast(Tensor, weight.grad) for weight in weights]


def load(optimizer: torch.optim.Optimizer, saved: Sequence[Saved], rank: int) -> None:
    """Go on from states of either side: masters, moments, counters, loss scale.

    Args:
        optimizer: written.
        saved: states of all ranks, perhaps of another number of them.
        rank: number of this one.
    """
    read: Callable[..., None] = optimizer.load_state_dict
    if isinstance(optimizer, SHARDED):
        # The masters, not the rounded weights.
        read(list(saved), load_from_fp32_weights=True)
    else:
        # All ranks hold the same.
        read(dict(saved[rank % len(saved)]))


def observed(
    optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an optimizer keeps, by name: masters, moments, counters.

    Args:
        optimizer: after a step; all ranks call this.
        names: of its weights.
    """
    state = optimizer.state
    if isinstance(optimizer, SHARDED):
        for name in names:
            for key in (None, "exp_avg", "exp_avg_sq"):
                yield f"{key or 'master'} {name}", optimizer.get_full_hp_param(name, key)
        for index, entry in enumerate(state.values()):
            yield f"step {index}", entry["step"]
        return
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for index, master in enumerate(masters):
        yield f"master {index}", master
        for name, value in sorted(state.get(master, {}).items()):
            yield f"{name} {index}", value


def _scaling(classes: Classes, plan: Plan) -> dict[str, object]:
    """The arguments for the loss-scale rule: the wrapper's own rule, or a scaler."""
    rule, first = plan.scaling
    if rule == "static":
        return {"static_loss_scale": first}
    constants = _constants(plan)
    if rule == "wrapper":
        return {"dynamic_loss_scale": True, "dynamic_loss_args": constants}
    hysteresis = {"delayed_shift": plan.delayed_shift} if rule == "dynamic" else {}
    scaler = classes.scaler(rule=rule, **constants, **hysteresis)
    return {"loss_scale_config": scaler}


def _zero_scaling(plan: Plan) -> dict[str, object]:
    """The arguments for the loss-scale rule of `ZeroOptimizer`, which has hysteresis."""
    rule, first = plan.scaling
    if rule == "static":
        return {"static_loss_scale": first}
    constants = {**_constants(plan), "delayed_shift": plan.delayed_shift}
    return {"dynamic_loss_scale": True, "dynamic_loss_args": constants}


def _constants(plan: Plan) -> dict[str, float]:
    """First scale, window and floor of a dynamic loss scale."""
    return {
        "init_scale": plan.scaling[1],
        "scale_window": plan.scale_window,
        "min_scale": plan.min_scale,
    }
