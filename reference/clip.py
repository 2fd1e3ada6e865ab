"""The two clip formulas: scaled gradients are unscaled and clipped in one factor, or only clipped.

factor = 1 / (scale * c),  c = (norm / scale + 1e-6) / max_norm   if c > 1    (clip_factor)
factor = max_norm / (norm + 1e-6)                      if that is below 1     (clip_coefficient)
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinstep.reference.arithmetic import fp32, fp64

CLIP_EPSILON = 1e-6


def clip_factor(*, norm: Tensor, scale: Tensor, max_norm: Tensor) -> Tensor:
    """Factor of scaled gradients: unscale and clip in one factor.

    c = (norm / scale + 1e-6) / max_norm;  factor = 1 / (scale * c) if c > 1, else 1 / scale.

    Args:
        norm: norm of the gradients as stored, still multiplied by scale; fp32, shape ().
        scale: loss scale, float64, shape ().
        max_norm: 0 or below disables clipping; float64, shape ().

    Returns:
        The factor, all float64, rounded once to fp32, shape (). A NaN norm does not clip.
    """
    return fp32(1.0 / combined_scale(norm=norm, scale=scale, max_norm=max_norm))


def combined_scale(*, norm: Tensor, scale: Tensor, max_norm: Tensor) -> Tensor:
    """Divisor of scaled gradients, to unscale and clip: scale c if c > 1, else scale.

    Arguments are those of `clip_factor`; the result is float64, shape ().
    """
    c = (fp64(norm) / scale + CLIP_EPSILON) / max_norm
    clips = (max_norm > 0) & (c > 1)
    return torch.where(clips, scale * c, scale)


def clip_coefficient(*, norm: Tensor, max_norm: Tensor) -> Tensor:
    """Factor of unscaled gradients.

    k = max_norm / (norm + 1e-6);  factor = k if k < 1, else 1.

    Args:
        norm: norm of the gradients, fp32, shape ().
        max_norm: 0 or below disables clipping; float64, shape ().

    Returns:
        The factor, float64 rounded once to fp32, shape (). A NaN norm gives 1, an infinite one 0.
    """
    k = max_norm / (fp64(norm) + CLIP_EPSILON)
    clips = (max_norm > 0) & (k < 1)
    return fp32(torch.where(clips, k, torch.ones_like(k)))
