"""The classes that replay traces, by side and name, and what goes inside a wrapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import twinstep.fast.optimizers.bf16
import twinstep.fast.optimizers.fp16
import twinstep.fast.optimizers.fp16_unfused
import twinstep.fast.optimizers.fused_adam
import twinstep.fast.optimizers.fused_lamb
import twinstep.fast.optimizers.scalers
import twinstep.fast.optimizers.zero
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fp16
import twinstep.reference.optimizers.fp16_unfused
import twinstep.reference.optimizers.fused_adam
import twinstep.reference.optimizers.fused_lamb
import twinstep.reference.optimizers.scalers
import twinstep.reference.optimizers.zero

CLASSES: Mapping[str, Mapping[str, Any]] = {
    "fast": {
        "FusedAdam": twinstep.fast.optimizers.fused_adam.FusedAdam,
        "FusedLamb": twinstep.fast.optimizers.fused_lamb.FusedLamb,
        "flat": twinstep.fast.optimizers.fp16.FP16Optimizer,
        "unfused": twinstep.fast.optimizers.fp16_unfused.FP16UnfusedOptimizer,
        "bf16": twinstep.fast.optimizers.bf16.BF16Optimizer,
        "zero": twinstep.fast.optimizers.zero.ZeroOptimizer,
        "static": twinstep.fast.optimizers.scalers.StaticLossScale,
        "dynamic": twinstep.fast.optimizers.scalers.DynamicLossScale,
    },
    "reference": {
        "FusedAdam": twinstep.reference.optimizers.fused_adam.FusedAdam,
        "FusedLamb": twinstep.reference.optimizers.fused_lamb.FusedLamb,
        "flat": twinstep.reference.optimizers.fp16.FP16Optimizer,
        "unfused": twinstep.reference.optimizers.fp16_unfused.FP16UnfusedOptimizer,
        "bf16": twinstep.reference.optimizers.bf16.BF16Optimizer,
        "zero": twinstep.reference.optimizers.zero.ZeroOptimizer,
        "static": twinstep.reference.optimizers.scalers.StaticLossScale,
        "dynamic": twinstep.reference.optimizers.scalers.DynamicLossScale,
    },
}
HUGE = 2.0**30


class Divided(torch.optim.SGD):
    """Stands in for LAMB: writes down what its gradients are to be divided by."""

    divisor = 0.0

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        grads: Sequence[Sequence[Tensor]] | None = None,
        output_params: Sequence[Sequence[Tensor]] | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Move nothing."""
        del closure, grads, output_params
        self.divisor = 0.0 if scale is None else scale.item()


def descent(side: str, groups: Sequence[Mapping[str, object]]) -> torch.optim.Optimizer:
    """Plain gradient descent by a side's `FusedAdam`, so that its own kernels take the step.

    With both betas 0, without bias correction, and with eps = 2**30 Adam moves by
    lr g / (|g| + eps), and below |g| = 64 the divisor is 2**30 exactly: with 2**30 times the
    learning rate that is lr g.
    """
    given = [{**group, "lr": float(cast(float, group["lr"])) * HUGE} for group in groups]
    made: torch.optim.Optimizer = CLASSES[side]["FusedAdam"](
        given, lr=HUGE, betas=(0.0, 0.0), eps=HUGE, bias_correction=False, adam_w_mode=False
    )
    return made
