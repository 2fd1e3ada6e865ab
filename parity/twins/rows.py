"""Our own optimizer classes, registered like anybody else's."""

from __future__ import annotations

from parity.twins.registry import DTYPES, register_optimizer, twins
from parity.twins.rules import AdamRules


class OurAdamRules(AdamRules):
    """Ours take numbers as 0-dim tensors, too."""

    tensor_hyper = True


def register_our_optimizers() -> None:
    """Register them; does nothing the second time."""
    from fast.fused_adam import FusedAdam
    from fast.fused_lamb import FusedLamb

    if any(twin.name == "fast.FusedAdam" for twin in twins()):
        return
    register_optimizer(
        "fast.FusedAdam",
        reference="FusedAdam",
        arithmetic="exact",
        dtypes=DTYPES,
        rules=OurAdamRules(),
        private=("_blocks", "_cache"),
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
