"""The few arithmetic pieces that the baselines of this package share.

Everything is IEEE fp32 or float64, rounded to nearest even, one rounding per operation. The
baselines are written apart from `reference` on purpose: no mistake of one can hide in the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

EXPONENT_BITS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
}


def fp32(value: Tensor) -> Tensor:
    """The value in fp32; exact from fp16 and bf16, one rounding from float64."""
    return value.to(torch.float32)


def scalar(value: float) -> Tensor:
    """A 0-dim fp32 tensor: `value`, formed in float64, rounded once."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def sqrt_rn(value: Tensor) -> Tensor:
    """The correctly rounded fp32 square root (torch's own fp32 root on the CPU is not)."""
    return fp32(value.to(torch.float64).sqrt())


def power(base: float, exponent: int) -> float:
    """Raise base to an exponent in float64 by square and multiply, lowest bit first."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def nonfinite(value: Tensor) -> bool:
    """True if any element is inf or NaN, decided by its exponent bits."""
    integer, mask = EXPONENT_BITS[value.dtype]
    bits = value.reshape(-1).view(integer) & mask
    return bool((bits == mask).any())


def square_root(value: float) -> float:
    """`math.sqrt` that lets NaN and inf through and never raises."""
    return math.sqrt(value) if value >= 0.0 else math.nan


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    """The exact real sum of squares, rounded once to float64; NaN and +inf if any element is."""
    values = [x for t in tensors for x in t.reshape(-1).to(torch.float64).tolist()]
    if any(math.isnan(x) for x in values):
        return math.nan
    if any(math.isinf(x) for x in values):
        return math.inf
    # The square of an fp32 number is exact in float64, and fsum rounds the whole sum once.
    return math.fsum(x * x for x in values)


def divide(numerator: float, denominator: float) -> float:
    """IEEE division of float64 values: no exception at zero."""
    quotient = torch.tensor(numerator, dtype=torch.float64) / torch.tensor(
        denominator, dtype=torch.float64
    )
    return float(quotient)
