"""Error bounds of small matrix products, for operations that users bring.

Each element of a product is a sum of n products in an order of the kernel's own, with or without
FMA: at most n roundings of half an ULP on top of each other (Higham 2002, section 3.1), charged
twice like every other rounding. What the operands carry goes through the absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.expected.bounds import ROUNDING, RULES, SMALLEST
from twinstep.parity.expected.carried import Carried


def _mm(operands: Sequence[Carried]) -> Carried:
    a, b = operands
    inner = a.exact.shape[1]
    exact = a.exact @ b.exact
    magnitude = (a.exact.abs() + a.error) @ (b.exact.abs() + b.error)
    through = a.error @ b.exact.abs() + a.exact.abs() @ b.error + a.error @ b.error
    error = through + inner * (ROUNDING * magnitude + SMALLEST)
    non_finite = ~torch.isfinite(a.exact).all(1, keepdim=True) | ~torch.isfinite(b.exact).all(0)
    # One zone in a row or column reaches every sum that it is part of.
    reached = a.zone.any(1, keepdim=True) | b.zone.any(0, keepdim=True) | non_finite
    return Carried(
        value=exact,
        exact=exact,
        error=error,
        peak=magnitude,
        gain=torch.ones_like(exact),
        zone=reached.expand(exact.shape),
    )


Reshape = Callable[[Tensor], Tensor]


def _reshaped(c: Carried, change: Reshape) -> Carried:
    return replace(
        c,
        value=change(c.exact),
        exact=change(c.exact),
        error=change(c.error),
        peak=change(c.peak + torch.zeros_like(c.exact)),
        gain=change(c.gain + torch.zeros_like(c.exact)),
        zone=change(c.zone.expand(c.exact.shape)),
    )


def _axis(operands: Sequence[Carried]) -> int:
    return int(operands[1].exact.item())


MATRIX_RULES: dict[str, Callable[[Sequence[Carried]], Carried]] = {
    "mm": _mm,
    "squeeze": lambda row: _reshaped(row[0], lambda x: x.squeeze(_axis(row))),
    "t": lambda row: _reshaped(row[0], lambda x: x.t()),
    "unsqueeze": lambda row: _reshaped(row[0], lambda x: x.unsqueeze(_axis(row))),
}


def add_matrix_rules() -> None:
    """Let references of users multiply matrices; does nothing the second time."""
    RULES.update(MATRIX_RULES)
