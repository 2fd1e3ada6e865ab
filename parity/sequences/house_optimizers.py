"""Our own optimizer classes, registered like anybody else's."""

from __future__ import annotations

from twinstep.parity.sequences.registry import DTYPES, register_optimizer, twins


def register_our_optimizers() -> None:
    """Register them; does nothing the second time."""
    from twinstep.fast.optimizers.apex_lamb import FusedLAMB
    from twinstep.fast.optimizers.bf16 import BF16Optimizer
    from twinstep.fast.optimizers.fp16 import FP16Optimizer
    from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
    from twinstep.fast.optimizers.fused_adam import FusedAdam
    from twinstep.fast.optimizers.fused_lamb import FusedLamb
    from twinstep.fast.optimizers.scalers import DynamicLossScale, StaticLossScale
    from twinstep.fast.optimizers.zero import ZeroOptimizer

    if any(twin.name == "fast.FusedAdam" for twin in twins()):
        return
    wrappers = (BF16Optimizer, FP16Optimizer, FP16UnfusedOptimizer, ZeroOptimizer)
    for cls in (FusedAdam, FusedLamb, FusedLAMB, *wrappers, DynamicLossScale, StaticLossScale):
        # Tensors on the CPU take the native kernels, whose rows cover every dtype: one for each
        # class is enough, for wrappers the one that they are made for.
        made_for = {BF16Optimizer: "bf16", FP16Optimizer: "fp16", FP16UnfusedOptimizer: "fp16"}
        # Kernels of apex's LAMB have the loops of `FusedLamb`, which is judged in every dtype.
        of_gpu = ("mixed",) if cls is FusedLAMB else DTYPES
        for name, engines, dtypes in (
            ("fast", ("cuda", "replay"), of_gpu),
            ("native", ("cpu",), (made_for.get(cls, "mixed"),)),
        ):
            register_optimizer(
                f"{name}.{cls.__name__}",
                reference=cls.__name__,
                arithmetic="exact",
                dtypes=dtypes,
                engines=engines,
            )(cls)
