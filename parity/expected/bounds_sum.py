"""The error bound of a sum of squares that somebody adds up in fp32, in an order of his own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF_ULP = 2.0**-24
SMALLEST = 2.0**-149
LARGEST = (2.0 - 2.0**-23) * 2.0**127


def bounded_l2_norm(
    value: Tensor, exacts: Sequence[Tensor], errors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm with its bound: exact, error (float64) and zone (bool), all shape ().

    A sum of n squares takes n roundings of squares and at most n - 1 additions in any order, so its
    relative error is at most about n half ULP of fp32 (Higham 2002, section 4.2); a square may lose
    a smallest subnormal, but zeros have no norm. Errors of the elements move the norm by at most
    their own norm (triangle inequality). An overflow of the squares is no rounding: +inf is
    accepted only where the norm itself comes near the largest fp32 number.

    Args:
        value: the reference's norm, fp32.
        exacts: the real elements, float64.
        errors: bound on |element - exact|, float64.
    """
    squares = _squares(exacts)
    count = squares.numel()
    total = _sum(squares)
    if math.isinf(total):
        exact = value.to(torch.float64)
        return exact, torch.zeros_like(exact), torch.zeros((), dtype=torch.bool)
    root = math.sqrt(total)
    moved = math.sqrt(_sum(_squares(errors)))
    if total == moved == 0.0:
        zero = torch.zeros((), dtype=torch.float64)
        return zero, zero, torch.zeros((), dtype=torch.bool)
    spread = (count + 2) * HALF_ULP * (root + moved) ** 2 + count * SMALLEST
    highest = math.sqrt(total + spread)
    lowest = math.sqrt(max(total - spread, 0.0))
    error = max(highest - root, root - lowest) + moved + 8 * HALF_ULP * root + SMALLEST
    zone = torch.tensor(root + error >= LARGEST)
    exact = torch.tensor(root, dtype=torch.float64)
    return exact, torch.tensor(error, dtype=torch.float64), zone


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.to(torch.float64).reshape(-1) for tensor in tensors]
    return torch.cat([*flat, torch.zeros(1, dtype=torch.float64)]) ** 2


def _sum(squares: Tensor) -> float:
    """Exact, rounded once; infinite if a square is not finite."""
    return math.fsum(squares.tolist()) if bool(torch.isfinite(squares).all()) else math.inf
