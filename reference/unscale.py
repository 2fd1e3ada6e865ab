"""Overflow: gradients with which no step is taken, and unscaling.

    found_inf = 1 if any stored element is inf or NaN, else 0
    g = g / scale, as one multiplication by inv_scale

`past_squares` is a second ground to skip, of every optimizer that wraps another.

Source: Micikevicius et al. (2018), section 3.2: a step with overflow is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.reference.arithmetic import fp32

# Its square is past the largest fp32 number: second moments would stay infinite for good.
LARGEST_NORM = 2.0**64
BOUNDED = (1.0, 2.0, math.inf)


def any_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if any stored element is inf or NaN, else 0.0; fp32, shape ().

    Every element is looked at alone. A test of the sum would report finite gradients whose sum
    overflows.

    Args:
        tensors: fp32, fp16 or bf16, any shapes; none at all gives 0.0.
    """
    found = torch.zeros((), dtype=torch.float32)
    for tensor in tensors:
        found = torch.maximum(found, fp32(torch.any(~torch.isfinite(tensor))))
    return found


def worst_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return 0.0 if every stored element is finite, 2.0 if one is NaN, else 1.0; fp32, shape ()."""
    nan = any(bool(torch.isnan(tensor).any()) for tensor in tensors)
    return torch.full((), 2.0) if nan else any_nonfinite(tensors)


def past_squares(norm: float, norm_type: float) -> bool:
    """True if squares of gradients with this norm may leave fp32, or the norm is not finite.

    Args:
        norm: of the gradients as stored.
        norm_type: of it; others than 1, 2 and infinity bound no square, and are let through.
    """
    return not norm < LARGEST_NORM and norm_type in BOUNDED


def unscale(grads: Sequence[Tensor], *, inv_scale: Tensor) -> list[Tensor]:
    """Multiply gradients by inv_scale: round(fp32(g) * inv_scale), non-finite ones too.

    A finite gradient that overflows only by unscaling is not an overflow of the backward pass:
    `any_nonfinite` is asked before.

    Args:
        grads: fp32, fp16 or bf16, any shapes.
        inv_scale: 1 / loss scale, fp32, shape ().

    Returns:
        New gradients, each rounded once to its dtype.
    """
    return [(fp32(grad) * inv_scale).to(grad.dtype) for grad in grads]
