"""The optimizer classes of both sides, by side and name."""

from __future__ import annotations

from typing import Any

import twinstep.fast.optimizers.apex_lamb
import twinstep.fast.optimizers.bf16
import twinstep.fast.optimizers.fp16
import twinstep.fast.optimizers.fp16_unfused
import twinstep.fast.optimizers.fused_adam
import twinstep.fast.optimizers.fused_lamb
import twinstep.fast.optimizers.scalers
import twinstep.fast.optimizers.zero
import twinstep.reference.optimizers.apex_lamb
import twinstep.reference.optimizers.bf16
import twinstep.reference.optimizers.fp16
import twinstep.reference.optimizers.fp16_unfused
import twinstep.reference.optimizers.fused_adam
import twinstep.reference.optimizers.fused_lamb
import twinstep.reference.optimizers.scalers
import twinstep.reference.optimizers.zero

SIDES = ("fast", "reference")
PLAIN = ("FusedAdam", "FusedLamb", "FusedLAMB")
# A counter for each parameter, and kernels that wrappers start themselves.
COUNTING = PLAIN[:2]
WRAPPERS = ("FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer")
CLASSES: dict[str, dict[str, Any]] = {
    "fast": {
        "FusedAdam": twinstep.fast.optimizers.fused_adam.FusedAdam,
        "FusedLamb": twinstep.fast.optimizers.fused_lamb.FusedLamb,
        "FusedLAMB": twinstep.fast.optimizers.apex_lamb.FusedLAMB,
        "FP16Optimizer": twinstep.fast.optimizers.fp16.FP16Optimizer,
        "FP16UnfusedOptimizer": twinstep.fast.optimizers.fp16_unfused.FP16UnfusedOptimizer,
        "BF16Optimizer": twinstep.fast.optimizers.bf16.BF16Optimizer,
        "ZeroOptimizer": twinstep.fast.optimizers.zero.ZeroOptimizer,
        "StaticLossScale": twinstep.fast.optimizers.scalers.StaticLossScale,
        "DynamicLossScale": twinstep.fast.optimizers.scalers.DynamicLossScale,
    },
    "reference": {
        "FusedAdam": twinstep.reference.optimizers.fused_adam.FusedAdam,
        "FusedLamb": twinstep.reference.optimizers.fused_lamb.FusedLamb,
        "FusedLAMB": twinstep.reference.optimizers.apex_lamb.FusedLAMB,
        "FP16Optimizer": twinstep.reference.optimizers.fp16.FP16Optimizer,
        "FP16UnfusedOptimizer": twinstep.reference.optimizers.fp16_unfused.FP16UnfusedOptimizer,
        "BF16Optimizer": twinstep.reference.optimizers.bf16.BF16Optimizer,
        "ZeroOptimizer": twinstep.reference.optimizers.zero.ZeroOptimizer,
        "StaticLossScale": twinstep.reference.optimizers.scalers.StaticLossScale,
        "DynamicLossScale": twinstep.reference.optimizers.scalers.DynamicLossScale,
    },
}
