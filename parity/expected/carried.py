"""Values carried by each element of a bounded tensor besides its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Facts of each element of a `Bounded` tensor; all float64 but `value` and `zone`.

    Attributes:
        value: the reference's own result, in the dtype of the formula.
        exact: the formula in float64.
        error: bound on |honest result - exact|.
        peak: largest magnitude that some order of the multiplications may pass through.
        gain: by how much divisions on the way may have magnified an underflow; 0 if there is none.
        zone: whether overflow depends on the order of operations.
        computed: whether an operation made it, so that another order may have rounded it otherwise.
    """

    value: Tensor
    exact: Tensor
    error: Tensor
    peak: Tensor
    gain: Tensor
    zone: Tensor
    computed: bool = True


def known(value: Tensor) -> Carried:
    """A number without error: an input, or a scalar the reference has formed."""
    exact = value.to(torch.float64)
    zero = torch.zeros_like(exact)
    zone = torch.zeros_like(exact, dtype=torch.bool)
    return Carried(
        value=value,
        exact=exact,
        error=zero,
        peak=exact.abs(),
        gain=zero + 1.0,
        zone=zone,
        computed=False,
    )
