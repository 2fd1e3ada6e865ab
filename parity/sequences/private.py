"""Attributes that our fast classes keep for themselves: what a class inherits with them is private.

What the host learns of a step only when it asks is kept elsewhere by each side. The optimizer
inside is seen through `param_groups` and `state`, what a scaler remembers through its state dict,
the rest through what is read after an action.
"""

from __future__ import annotations

OURS = "twinstep.fast.optimizers."
SCALED = (
    *("_fixed", "_groups", "_inner", "_norm", "_pending", "_parallelism", "_stale", "_step"),
    *("_group_plan", "_plan", "_rows", "_stepped", "_without_experts", "_zero_gradients"),
    *("groups", "loss_scaler", "optimizer", "overflow"),
)
SCALERS = ("_block", "_counters", "_placed", "compat", "rule", "scaling", "state")
PRIVATE = {
    "FusedAdam": ("_blocks", "_cache", "_fixed", "_plan", "_repeated"),
    "FusedLamb": ("_blocks", "_cache", "_fixed", "_plan", "_ratios", "_repeated"),
    "FusedLAMB": ("_cache", "_groups"),
    "BF16Optimizer": (
        *("_fixed", "_inner", "_pending", "_parallelism", "_step", "_whole", "_hooks", "_norm"),
        *("_accumulation", "_group_plan", "_runs", "optimizer", "overflow", "timers"),
    ),
    "FP16Optimizer": SCALED,
    "FP16UnfusedOptimizer": SCALED,
    # A step that is refused on one rank leaves each side a norm of its own.
    "ZeroOptimizer": (
        *SCALED,
        *("_buckets", "_hooks", "_offload", "_reduced", "_taken", "_global_grad_norm"),
    ),
    "DynamicLossScale": SCALERS,
    "StaticLossScale": SCALERS,
}


def kept_by(cls: type) -> tuple[str, ...]:
    """Private attributes of a class that is one of our fast ones, or derives from one."""
    ours = (base.__name__ for base in cls.__mro__ if base.__module__.startswith(OURS))
    return tuple(name for base in ours for name in PRIVATE.get(base, ()))
