"""Publishing master weights: round fp32 once to the dtype of the model weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twinstep.reference.arithmetic import fp32
from twinstep.reference.lists import check_lengths


def cast_copy(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> tuple[list[Tensor]]:
    """Round each source to the dtype of its copy, to nearest, ties to even.

    Args:
        sources: fp32 (or narrower), any shapes.
        copies: give the dtypes; their contents are written, never read.

    Returns:
        New copies, shaped like the given ones. Values past the range of the dtype become
        infinite; -0.0 stays -0.0.
    """
    check_lengths("cast_copy", {"copies": copies, "sources": sources})
    rows = zip(sources, copies, strict=True)
    return ([fp32(source).to(copy.dtype) for source, copy in rows],)
