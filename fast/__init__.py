"""The production side: the reference's operations in Triton, in place and without host syncs.

    from twinstep.fast import FP16Optimizer, FusedAdam

    optimizer = FP16Optimizer(FusedAdam(model.parameters(), lr=1e-3), dynamic_loss_scale=True)

The optimizer classes and scalers are here; the launchers of single operations are in
`fast.kernels`, one module for each, and DeepSpeed's and apex's signatures in `fast.deepspeed`.
Importing `fast` loads nothing; Triton comes with the first name that needs it.
"""

if __name__ != "twinstep.fast":
    raise ImportError("import twinstep.fast, not fast")

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinstep.contract.compat import Compat
    from twinstep.contract.errors import MinimumLossScale
    from twinstep.fast.optimizers.apex_lamb import FusedLAMB
    from twinstep.fast.optimizers.bf16 import BF16Optimizer
    from twinstep.fast.optimizers.fp16 import FP16Optimizer
    from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
    from twinstep.fast.optimizers.fused_adam import FusedAdam
    from twinstep.fast.optimizers.fused_lamb import FusedLamb
    from twinstep.fast.optimizers.scalers import DynamicLossScale, StaticLossScale
    from twinstep.fast.optimizers.zero import ZeroOptimizer

__all__ = [
    "BF16Optimizer",
    "Compat",
    "DynamicLossScale",
    "FP16Optimizer",
    "FP16UnfusedOptimizer",
    "FusedAdam",
    "FusedLAMB",
    "FusedLamb",
    "MinimumLossScale",
    "StaticLossScale",
    "ZeroOptimizer",
]


def __getattr__(name: str) -> object:
    """Load the public names when one is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'twinstep.fast' has no attribute {name!r}")
    from twinstep.fast import public

    return getattr(public, name)
