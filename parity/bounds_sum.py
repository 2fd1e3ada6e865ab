"""The error bound of a sum of squares that somebody adds up in fp32, in an order of his own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HALF_ULP = 2.0**-24
SMALLEST = 2.0**-149
LARGEST = (2.0 - 2.0**-23) * 2.0**127


def bounded_l2_norm(
    norm_of: Callable[..., object], tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm with its bound: value (fp32), exact, error (float64), zone (bool), all shape ().

    A sum of n squares takes n roundings of squares and at most n - 1 additions in any order, so its
    relative error is at most about n half ULP of fp32 (Higham 2002, section 4.2); a square may lose
    a smallest subnormal. An overflow of the squares is no rounding: +inf is accepted only where the
    norm itself comes near the largest fp32 number.
    """
    value = norm_of(tensors)
    if not isinstance(value, Tensor):
        raise TypeError(f"the norm returned {type(value).__name__}, not a tensor")
    wide = [tensor.to(torch.float64).reshape(-1) for tensor in tensors]
    squares = torch.cat([*wide, torch.zeros(1, dtype=torch.float64)]) ** 2
    count = squares.numel()
    total = math.fsum(squares.tolist()) if bool(torch.isfinite(squares).all()) else math.inf
    exact = value.to(torch.float64) if math.isinf(total) else torch.tensor(math.sqrt(total))
    exact = exact.to(torch.float64)
    spread = (count + 2) * HALF_ULP * total + count * SMALLEST
    if math.isinf(total):
        return value, exact, torch.zeros_like(exact), torch.zeros((), dtype=torch.bool)
    highest = math.sqrt(total + spread)
    lowest = math.sqrt(max(total - spread, 0.0))
    root = math.sqrt(total)
    error = max(highest - root, root - lowest) + 8 * HALF_ULP * root + SMALLEST
    zone = torch.tensor(root + error >= LARGEST)
    return value, exact, torch.tensor(error, dtype=torch.float64), zone
