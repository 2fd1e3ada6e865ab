"""Gradient accumulation: a = fp32(a) + fp32(g), rounded once to the accumulator's dtype."""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import require_lists
from twinstep.fast.kernels import accumulate as kernels


def accumulate_(accumulators: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add every gradient to its accumulator.

    Args:
        accumulators: fp32, fp16 or bf16, contiguous; written.
        grads: of the same shapes, fp32, fp16 or bf16, contiguous.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
    """
    lists = {"accumulators": accumulators, "grads": grads}
    if len(accumulators) or len(grads):
        near = (*accumulators, *grads)[0]
        require_lists("accumulate_", lists, dict.fromkeys(lists, FLOATS), near)
        kernels.accumulate_(accumulators, grads)
