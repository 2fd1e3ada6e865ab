"""Gradients that are finite and still no step can be taken with."""

from __future__ import annotations

import math

# Its square is past the largest fp32 number: second moments would stay infinite for good.
LARGEST_NORM = 2.0**64
BOUNDED = (1.0, 2.0, math.inf)


def past_squares(norm: float, norm_type: float) -> bool:
    """True if squares of gradients with this norm may leave fp32, or the norm is not finite.

    Args:
        norm: of the gradients as stored.
        norm_type: of it; others than 1, 2 and infinity bound no square, and are let through.
    """
    return not norm < LARGEST_NORM and norm_type in BOUNDED
