"""Contents of memory that nothing has written: zeros, and three that no kernel can live with.

Fresh memory is mostly zero, and recycled memory holds plausible numbers: what depends on either
is right in most runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

GARBAGE = ("zeros", "set bits", "ones", "large")
BYTES = {"zeros": 0x00, "set bits": 0xFF, "ones": 0x01, "large": 0x7B}
"""The same for memory without a dtype: 0x7B7B is large in every format."""


def _number(dtype: torch.dtype, garbage: str) -> float:
    """The element of a dtype."""
    if garbage in ("zeros", "ones") or dtype == torch.bool:
        return float(garbage in ("ones", "set bits"))
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan") if garbage == "set bits" else 0.75 * torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    return limits.max // 3 if garbage == "large" else -1 if limits.min else limits.max


def spoil(tensor: Tensor, garbage: str, kept: int = 0) -> None:
    """Fill all memory of a tensor but its first `kept` bytes."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    start = -(-kept // size)
    rest = storage.nbytes() // size - start
    if rest > 0:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(storage, start, (rest,), (1,)).fill_(_number(tensor.dtype, garbage))


def spoiled(tensor: Tensor, garbage: str) -> Tensor:
    """A tensor like this one that holds garbage."""
    return torch.full_like(tensor, _number(tensor.dtype, garbage))
