"""Norms of gradients by kind: which ones kernels have, and the others on the host."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fast.kernels.magnitudes import reduce_magnitudes
from fast.kernels.reduce import reduce_squares
from fast.tables import TableCache

KINDS = {1.0: "1", 2.0: "2", math.inf: "inf"}
GIVEN = "given"  # the host computes the norm


def kind_of_norm(norm_type: float, where: str) -> str:
    """Return how a norm is computed: the name of a kernel's norm, or GIVEN.

    Raises:
        ValueError: norm_type is not positive.
    """
    if not norm_type > 0.0:
        raise ValueError(f"norm_type={norm_type}, but should be positive or infinite [{where}]")
    return KINDS.get(float(norm_type), GIVEN)


def reduce_norm(grads: Sequence[Tensor], limbs: Tensor, kind: str, cache: TableCache) -> None:
    """Enter all gradients into the limbs, in one launch for each dtype."""
    if kind in ("1", "inf"):
        reduce_magnitudes(grads, limbs, kind, cache)
    else:
        reduce_squares(grads, limbs, cache)


def norm_on_host(grads: Sequence[Tensor], power: float) -> float:
    """Return (sum |g|^power)^(1/power) in float64, each power rounded, their sum once.

    Reads every gradient, and so waits for the device. Any NaN gives NaN, otherwise any infinity
    gives infinity.
    """
    magnitudes = [
        m for grad in grads for m in grad.detach().to(torch.float64).abs().view(-1).tolist()
    ]
    if any(math.isnan(m) for m in magnitudes):
        return math.nan
    if any(math.isinf(m) for m in magnitudes):
        return math.inf
    return float(math.fsum(m**power for m in magnitudes) ** (1.0 / power))
