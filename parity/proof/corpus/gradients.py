"""Correct unscale, global norm and clipping in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import (
    divide,
    fp32,
    nonfinite,
    square_root,
    sum_of_squares,
)
from twinstep.parity.proof.corpus.calls import (
    ClipCoefficientCall,
    ClipFactorCall,
    GlobalNormCall,
    Tensors,
    UnscaleCall,
)


def raise_flag(found_inf: Tensor, overflow: bool) -> None:
    """found_inf becomes 1.0 on overflow and otherwise keeps what it held."""
    if overflow:
        found_inf.fill_(1.0)


def unscale(call: UnscaleCall, overflow: Callable[[Tensor], bool] = nonfinite) -> None:
    """Every gradient times inv_scale, rounded once; the raw values decide found_inf."""
    for g in call.grads:
        raise_flag(call.found_inf, overflow(g))
        g.copy_(fp32(g) * call.inv_scale)


def exact_norm(grads: Tensors) -> float:
    """The root of the exact sum of squares."""
    return square_root(sum_of_squares(grads))


def global_norm(
    call: GlobalNormCall,
    norm: Callable[[Tensors], float] = exact_norm,
    overflow: Callable[[Tensor], bool] = nonfinite,
) -> None:
    """The norm of all gradients, fp32; found_inf is raised by any that is not finite."""
    call.norm.copy_(torch.tensor(norm(call.grads), dtype=torch.float64))
    for g in call.grads:
        raise_flag(call.found_inf, overflow(g))


def combined_scale(norm: float, scale: float, max_norm: float, slack: float = 1e-6) -> float:
    """The scale times max(1, (norm / scale + 1e-6) / max_norm); `scale` alone without a limit."""
    clip = divide(divide(norm, scale) + slack, max_norm)
    return scale * clip if max_norm > 0.0 and clip > 1.0 else scale


def clip_factor(
    call: ClipFactorCall, combined: Callable[[float, float, float], float] = combined_scale
) -> None:
    """One over the combined scale, formed in float64, rounded once."""
    total = combined(float(call.norm), float(call.scale), float(call.max_norm))
    call.factor.copy_(torch.tensor(divide(1.0, total), dtype=torch.float64))


def coefficient(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)); one without a limit."""
    k = divide(max_norm, norm + 1e-6)
    return k if max_norm > 0.0 and k < 1.0 else 1.0


def clip_coefficient(
    call: ClipCoefficientCall, formula: Callable[[float, float], float] = coefficient
) -> None:
    """The clip coefficient, formed in float64, rounded once."""
    value = formula(float(call.norm), float(call.max_norm))
    call.factor.copy_(torch.tensor(value, dtype=torch.float64))
