"""Tensors far larger than memory.

Virtual ones exist only where they are touched; folded ones show one small tile over and over.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

GAP = 2**31
"""Elements of unowned addresses on either side of a virtual tensor: an offset that wrapped at 32
bits lands at most so far from the tensor's start, and there it is out of bounds, not in another
tensor."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def virtual_tensor(shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero-filled CPU tensor that takes memory only where it is touched.

    For index arithmetic past 2³¹ elements: allocate billions of elements, run only the blocks in
    question (`options(only_blocks=...)` or `options(only_ends=...)`), and look at the few elements
    they wrote. Do not call torch functions on the whole of it: they touch every page. Around it lie
    addresses that belong to no tensor, `GAP` elements on either side.

    Args:
        shape: Number of elements or shape.
        dtype: Any torch dtype.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    count, width = math.prod(extents), torch.empty(0, dtype=dtype).element_size()
    gap = GAP * width
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, max(count * width, 1) + 2 * gap, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=gap).view(extents)


def virtual_ends(tensors: Sequence[torch.Tensor], numel: int) -> list[torch.Tensor]:
    """The same list with its last tensor blown up to `numel` elements, virtually.

    The large tensor begins with the values of the small one and ends with them; between lie zeros.
    So one small case, and one evaluation of its reference, says what both ends must hold after
    `options(only_ends=...)` ran the first and the last blocks of every launch:

        huge = {name: virtual_ends(tensors, 3_000_000_000) for name, tensors in case.lists.items()}
        with replay.options(only_ends=8):
            kernel(*huge.values(), **case.controls, **case.options)
        for name, tensors in huge.items():
            head, tail = ends_of(tensors[-1], case.lists[name][-1].numel())

    Both ends must be covered by the blocks that run: the small tensor should be no larger than
    `only_ends` times the smallest block that is to be judged. A kernel of few programs that each
    walk over the whole tensor walks over all `numel` elements, which takes minutes.

    0-dim tensors (step counters) and empty ones are left as they are; the other tensors of the
    list too. Nothing is shared with `tensors`.

    Args:
        tensors: One list argument, contiguous tensors.
        numel: Elements of the new last tensor; at least twice those of the old one.
    """
    copies = [tensor.clone() for tensor in tensors]
    if not copies or copies[-1].dim() == 0 or copies[-1].numel() == 0:
        return copies
    small = copies[-1].reshape(-1)
    if numel < 2 * small.numel():
        raise ValueError(f"numel is {numel}, but should be at least {2 * small.numel()}.")
    large = virtual_tensor(numel, small.dtype)
    large[: small.numel()] = small
    large[numel - small.numel() :] = small
    return [*copies[:-1], large]


def ends_of(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the first and of the last `count` elements."""
    flat = tensor.reshape(-1)
    return flat[:count].clone(), flat[flat.numel() - count :].clone()


def touched(tensor: torch.Tensor) -> torch.Tensor:
    """Flags of the pages of a virtual tensor: true for those that anything has touched."""
    size = tensor.numel() * tensor.element_size()
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(tensor.data_ptr() + size - start) // mmap.PAGESIZE)
    found = torch.zeros(pages, dtype=torch.uint8)
    if _LIBC.mincore(start, pages * mmap.PAGESIZE, found.data_ptr()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return (found & 1).bool()


def folded_tensor(tile: torch.Tensor, numel: int) -> torch.Tensor:
    """A 1-D CPU tensor of `numel` elements that repeats `tile` and takes the memory of one tile.

    The same pages are mapped again and again at ascending addresses, so element i and element
    i + tile.numel() are one: what is written to one shows in the other. For counting what a kernel
    does with more data than there is memory, never for judging what it computes.

    Args:
        tile: The values; its bytes must be a multiple of the page size. It is copied.
        numel: Elements of the result.

    Raises:
        ValueError: if the tile does not fill whole pages.
        OSError: if the addresses cannot be mapped.
    """
    size = tile.numel() * tile.element_size()
    if size == 0 or size % mmap.PAGESIZE:
        raise ValueError(f"tile has {size} bytes, but should be a multiple of {mmap.PAGESIZE}.")
    times = max(1, -(-numel // tile.numel()))
    handle = os.memfd_create("tile")
    try:
        os.ftruncate(handle, size)
        base = _map(None, times * size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)
        both = mmap.PROT_READ | mmap.PROT_WRITE
        for index in range(times):
            _map(base + index * size, size, both, mmap.MAP_SHARED | _FIXED, handle)
    finally:
        os.close(handle)
    memory = (ctypes.c_ubyte * (times * size)).from_address(base)
    weakref.finalize(memory, _LIBC.munmap, base, times * size)
    whole = torch.frombuffer(memory, dtype=tile.dtype, count=times * tile.numel())
    whole[: tile.numel()] = tile.reshape(-1)
    return whole[:numel]


def forget_pages(*folded: torch.Tensor) -> None:
    """Give back the page tables of folded tensors; what they hold stays.

    A process's resident size counts a page once for each address that it was seen at.
    """
    for tensor in folded:
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            _LIBC.madvise(tensor.data_ptr(), size, mmap.MADV_DONTNEED)


def _map(address: int | None, size: int, access: int, flags: int, handle: int) -> int:
    found = _LIBC.mmap(address, size, access, flags, handle, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes failed: {os.strerror(code)}")
    return int(found)
