"""Error bounds of small matrix products, for operations that users bring.

Each element of a product is a sum of n products in an order of the kernel's own, with or without
FMA: at most n roundings of half an ULP on top of each other (Higham 2002, section 3.1), charged
twice like every other rounding. What the operands carry goes through the absolute values.
"""

from __future__ import annotations

import torch

from twinstep.parity.expected.bounds import ROUNDING, SMALLEST
from twinstep.parity.expected.carried import Carried, Operands


def product(operands: Operands) -> Carried:
    """Matrix products, one or a batch."""
    a, b = operands
    inner = a.exact.shape[-1]
    exact = a.exact @ b.exact
    magnitude = (a.exact.abs() + a.error) @ (b.exact.abs() + b.error)
    through = a.error @ b.exact.abs() + a.exact.abs() @ b.error + a.error @ b.error
    error = through + inner * (ROUNDING * magnitude + SMALLEST)
    # One zone in a row or column reaches every sum that it is part of.
    rows = (a.zone | ~torch.isfinite(a.exact)).any(-1, keepdim=True)
    reached = rows | (b.zone | ~torch.isfinite(b.exact)).any(-2, keepdim=True)
    return Carried(
        value=exact,
        exact=exact,
        error=error,
        peak=magnitude,
        gain=torch.ones_like(exact),
        zone=reached.expand(exact.shape),
    )
