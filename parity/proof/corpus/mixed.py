"""A correct mixed-precision step, built from the other baselines, with its order as fields.

found_inf and norm of the scaled gradients -> factor from the scale in force
-> Adam or AdamW unless found_inf -> the loss-scale rule
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinstep.parity.proof.corpus import adam
from twinstep.parity.proof.corpus.arithmetic import divide, nonfinite
from twinstep.parity.proof.corpus.calls import (
    AdamCall,
    ClipFactorCall,
    DynamicCall,
    MixedCall,
    Tensors,
    TorchScaleCall,
    WrapperCall,
    part,
)
from twinstep.parity.proof.corpus.gradients import clip_factor, exact_norm
from twinstep.parity.proof.corpus.scales import update_dynamic, update_torch, update_wrapper


def any_overflow(grads: Tensors) -> bool:
    """True if any gradient is not finite."""
    return any(nonfinite(g) for g in grads)


def fp32_norm(grads: Tensors) -> Tensor:
    """The norm of the scaled gradients, fp32."""
    return torch.tensor(exact_norm(grads), dtype=torch.float64).to(torch.float32)


def factor_of(call: MixedCall, norm: Tensor) -> Tensor:
    """Result of `clip_factor` for the norm and the scale in force."""
    factor = torch.zeros((), dtype=torch.float32)
    clip_factor(part(ClipFactorCall, call, norm=norm, factor=factor))
    return factor


def update(call: MixedCall, factor: Tensor) -> None:
    """Adam or AdamW with this factor, unless found_inf asks to skip."""
    pieces = adam.ADAMW if call.adam_w_mode else adam.ADAM
    adam.step(part(AdamCall, call, factor=factor), pieces)


def move_scale(call: MixedCall) -> None:
    """The loss-scale rule of the call; the static one does nothing."""
    if call.rule == "dynamic":
        update_dynamic(part(DynamicCall, call))
    elif call.rule == "wrapper":
        update_wrapper(part(WrapperCall, call))
    elif call.rule == "torch":
        growth, interval = call.scale_factor, call.scale_window
        update_torch(part(TorchScaleCall, call, growth_factor=growth, growth_interval=interval))


def report_norm(call: MixedCall, norm: Tensor, scale: float) -> None:
    """The norm of the unscaled gradients."""
    call.norm.copy_(torch.tensor(divide(float(norm), scale), dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class MixedPieces:
    """The parts of the step; the defaults are right."""

    overflow: Callable[[Tensors], bool] = any_overflow
    factor: Callable[[MixedCall, Tensor], Tensor] = factor_of
    update: Callable[[MixedCall, Tensor], None] = update
    move_scale: Callable[[MixedCall], None] = move_scale
    report: Callable[[MixedCall, Tensor, float], None] = report_norm
    scale_moves_first: bool = False
    clears_found_inf: bool = True


MIXED = MixedPieces()


def mixed_step(call: MixedCall, f: MixedPieces = MIXED) -> None:
    """The whole step, in its order."""
    found = f.overflow(call.grads)
    if f.clears_found_inf or found:
        call.found_inf.fill_(float(found))
    norm = fp32_norm(call.grads)
    if f.scale_moves_first:
        f.move_scale(call)
    scale = float(call.scale)
    f.update(call, f.factor(call, norm))
    if not f.scale_moves_first:
        f.move_scale(call)
    f.report(call, norm, scale)


def unscaled_only(call: MixedCall, norm: Tensor) -> Tensor:
    """One over the scale: the factor without clipping."""
    return factor_of(replace(call, max_norm=torch.zeros_like(call.max_norm)), norm)
