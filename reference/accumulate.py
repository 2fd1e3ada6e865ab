"""Gradient accumulation: add in fp32, round once to the accumulator's dtype."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twinstep.reference.arithmetic import fp32
from twinstep.reference.parameters import check_lengths


def accumulate(accumulators: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Add each gradient to its accumulator.

    a = round(fp32(a) + fp32(g))

    Args:
        accumulators: fp32, or bf16/fp16; any shapes.
        grads: fp32, fp16 or bf16, one per accumulator.

    Returns:
        New accumulators, in their own dtype. In bf16 a gradient below half an ULP of the sum is
        lost for good; that is what fp32 accumulators are for.
    """
    check_lengths("accumulate", {"accumulators": accumulators, "grads": grads})
    rows = zip(accumulators, grads, strict=True)
    return [(fp32(a) + fp32(g)).to(a.dtype) for a, g in rows]
