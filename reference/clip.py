"""The norm of all gradients, and the two clip formulas.

    S      = sum of g^2 over every stored element, as a real number, rounded once to float64
    norm   = fp32(sqrt(S))
    factor = 1 / (scale * c),  c = (norm / scale + 1e-6) / max_norm   if c > 1    (clip_factor)
    factor = max_norm / (norm + 1e-6)                      if that is below 1     (clip_coefficient)

The sum is exact, so neither the order of tensors nor how they are split can matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from twinstep.reference.arithmetic import fp32, fp64
from twinstep.reference.overflow import any_nonfinite

CLIP_EPSILON = 1e-6


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Root of the exact sum of squares of all elements; fp32, shape ().

    A square of an fp32 number is exact in float64, and `math.fsum` rounds the real sum once.
    Tensor subclasses can take this function over through `__torch_function__`.

    Args:
        tensors: fp32, fp16 or bf16, any shapes. Any NaN gives NaN, otherwise any infinity gives
            +inf; a norm above the largest fp32 number gives +inf; no elements give 0.0.
    """
    if has_torch_function(tensors):
        taken_over: Tensor = handle_torch_function(l2_norm, tensors, tensors)
        return taken_over
    root = math.sqrt(math.fsum(_squares(tensors)))
    return fp32(torch.tensor(root, dtype=torch.float64))


def _squares(tensors: Sequence[Tensor]) -> Iterator[float]:
    for tensor in tensors:
        wide = fp64(tensor)
        yield from (wide * wide).reshape(-1).tolist()


def global_norm(
    grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm of all gradients, and whether any is non-finite.

    Args:
        grads: fp32, fp16 or bf16, any shapes.
        norm: written, never read; fp32, shape ().
        found_inf: what is known so far, 0.0 or 1.0, fp32, shape ().

    Returns:
        The norm as `l2_norm` defines it, and found_inf: 1.0 if any gradient is non-finite,
        otherwise the incoming value.
    """
    del norm
    return l2_norm(grads), torch.maximum(found_inf, any_nonfinite(grads))


def clip_factor(*, norm: Tensor, scale: Tensor, max_norm: Tensor, factor: Tensor) -> tuple[Tensor]:
    """What scaled gradients are multiplied by: unscale and clip in one factor.

    c = (norm / scale + 1e-6) / max_norm;  factor = 1 / (scale * c) if c > 1, else 1 / scale.

    Args:
        norm: norm of the gradients as stored, still multiplied by scale; fp32, shape ().
        scale: loss scale, float64, shape ().
        max_norm: 0 or below disables clipping; float64, shape ().
        factor: written, never read; fp32, shape ().

    Returns:
        The new factor, all float64, rounded once to fp32. A NaN norm does not clip.
    """
    del factor
    return (fp32(1.0 / combined_scale(norm=norm, scale=scale, max_norm=max_norm)),)


def combined_scale(*, norm: Tensor, scale: Tensor, max_norm: Tensor) -> Tensor:
    """What scaled gradients are divided by, to unscale and clip: scale c if c > 1, else scale.

    Arguments are those of `clip_factor`; the result is float64, shape ().
    """
    c = (fp64(norm) / scale + CLIP_EPSILON) / max_norm
    clips = (max_norm > 0) & (c > 1)
    return torch.where(clips, scale * c, scale)


def clip_coefficient(*, norm: Tensor, max_norm: Tensor, factor: Tensor) -> tuple[Tensor]:
    """What unscaled gradients are multiplied by.

    k = max_norm / (norm + 1e-6);  factor = k if k < 1, else 1.

    Args:
        norm: norm of the gradients, fp32, shape ().
        max_norm: 0 or below disables clipping; float64, shape ().
        factor: written, never read; fp32, shape ().

    Returns:
        The new factor, float64 rounded once to fp32. A NaN norm gives 1, an infinite one 0.
    """
    del factor
    k = max_norm / (fp64(norm) + CLIP_EPSILON)
    clips = (max_norm > 0) & (k < 1)
    return (fp32(torch.where(clips, k, torch.ones_like(k))),)
