"""What the FP16 optimizers save of their loss scale: what the rule remembers, and two constants."""

from __future__ import annotations

from twinstep.contract.loss_scale import Saved
from twinstep.reference.loss_scale import DynamicRule, WrapperRule
from twinstep.reference.scalers import DynamicLossScale, LossScale


def saved_scale(scaler: LossScale) -> Saved:
    """The dict of a scaler, with the factor and the window that DeepSpeed reads.

    They are written for DeepSpeed alone: whoever loads the dict here keeps the constants of its own
    constructor. Rules that DeepSpeed does not have get none.
    """
    saved = scaler.state_dict()
    rule = scaler.rule if isinstance(scaler, DynamicLossScale) else None
    if isinstance(rule, DynamicRule | WrapperRule):
        saved |= {"scale_factor": rule.scale_factor, "scale_window": rule.scale_window}
    return saved
