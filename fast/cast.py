"""Copies in another precision: c = fp32(s), rounded once to nearest even."""

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.checks import require_lists
from twinstep.fast.kernels import cast as kernels


def cast_copy_(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Write every source into its copy.

    Args:
        sources: fp32, fp16 or bf16, contiguous.
        copies: of the same shapes, fp32, fp16 or bf16, contiguous; written.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
    """
    lists = {"sources": sources, "copies": copies}
    if len(sources) or len(copies):
        near = (*sources, *copies)[0]
        require_lists("cast_copy_", lists, dict.fromkeys(lists, FLOATS), near)
        kernels.cast_copy_(sources, copies)
