"""Our own optimizer classes, registered like anybody else's."""

from __future__ import annotations

from twinstep.parity.sequences.adam_rules import TensorAdamRules
from twinstep.parity.sequences.registry import DTYPES, register_optimizer, twins

# What the host learns of a step only when it asks, and where each side keeps it. The optimizer
# inside is seen through `param_groups` and `state`, the rest through what is read after an action.
SCALED = (
    *("_fixed", "_groups", "_inner", "_norm", "_pending", "_parallelism", "_stale", "_step"),
    *("_stepped", "_without_experts", "_zeros"),
    *("groups", "loss_scaler", "optimizer", "overflow"),
)


def register_our_optimizers() -> None:
    """Register them; does nothing the second time."""
    from twinstep.fast.optimizers.bf16 import BF16Optimizer
    from twinstep.fast.optimizers.fp16 import FP16Optimizer
    from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
    from twinstep.fast.optimizers.fused_adam import FusedAdam
    from twinstep.fast.optimizers.fused_lamb import FusedLamb
    from twinstep.fast.optimizers.scalers import DynamicLossScale, StaticLossScale

    if any(twin.name == "fast.FusedAdam" for twin in twins()):
        return
    register_optimizer(
        "fast.FusedAdam",
        reference="FusedAdam",
        arithmetic="exact",
        dtypes=DTYPES,
        rules=TensorAdamRules(),
        private=("_blocks", "_cache", "_fixed"),
        engines=("cuda", "replay"),
    )(FusedAdam)
    register_optimizer(
        "fast.FusedLamb",
        reference="FusedLamb",
        arithmetic="exact",
        dtypes=DTYPES,
        private=("_blocks", "_cache", "_ratios"),
        engines=("cuda", "replay"),
    )(FusedLamb)
    register_optimizer(
        "fast.BF16Optimizer",
        reference="BF16Optimizer",
        arithmetic="exact",
        dtypes=DTYPES,
        private=(
            *("_fixed", "_inner", "_pending", "_parallelism", "_step", "_whole", "_hooks", "_norm"),
            *("optimizer", "overflow", "timers"),
        ),
        engines=("cuda", "replay"),
    )(BF16Optimizer)
    register_optimizer(
        "fast.FP16Optimizer",
        reference="FP16Optimizer",
        arithmetic="exact",
        dtypes=DTYPES,
        private=SCALED,
        engines=("cuda", "replay"),
    )(FP16Optimizer)
    register_optimizer(
        "fast.FP16UnfusedOptimizer",
        reference="FP16UnfusedOptimizer",
        arithmetic="exact",
        dtypes=DTYPES,
        private=SCALED,
        engines=("cuda", "replay"),
    )(FP16UnfusedOptimizer)
    for scaler in (DynamicLossScale, StaticLossScale):
        register_optimizer(
            f"fast.{scaler.__name__}",
            reference=scaler.__name__,
            arithmetic="exact",
            dtypes=DTYPES,
            # What it remembers is seen through its state dict, read after every action.
            private=("_block", "_counters", "compat", "rule", "scaling", "state"),
            engines=("cuda", "replay"),
        )(scaler)
