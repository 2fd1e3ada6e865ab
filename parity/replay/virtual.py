"""Tensors far larger than memory, of which only the touched pages exist."""

from __future__ import annotations

import mmap

import torch

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def virtual_tensor(shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero-filled CPU tensor that takes memory only where it is touched.

    For index arithmetic past 2³¹ elements: allocate billions of elements, run only the blocks in
    question (`options(only_blocks=...)`), and look at the few elements they wrote. Do not call
    torch functions on the whole of it: they touch every page.

    Args:
        shape: Number of elements or shape.
        dtype: Any torch dtype.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for extent in extents:
        count *= extent
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    size = max(count * torch.empty(0, dtype=dtype).element_size(), 1)
    memory = mmap.mmap(-1, size, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(extents)
