"""Buffers: tensors laid end to end, each starting at a multiple of `slot`; and narrower copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.reference.arithmetic import fp32


def offsets(numels: Sequence[int], slot: int) -> list[int]:
    """Starts of tensors: each at the first multiple of slot at or after the end of the one before.

    Args:
        numels: number of elements of each tensor; 0 is allowed and takes no room.
        slot: alignment in elements, at least 1.

    Returns:
        One start per tensor, and last the end of the last tensor (not rounded up).

    >>> offsets([3, 5, 0, 2], 4)
    [0, 4, 12, 12, 14]
    """
    if slot < 1:
        raise ValueError(f"slot={slot}, but should be at least 1 element [flatten]")
    starts, end = [], 0
    for numel in numels:
        start = -(-end // slot) * slot
        starts.append(start)
        end = start + numel
    return [*starts, end]


def flatten(tensors: Sequence[Tensor], like: Tensor, *, slot: int) -> Tensor:
    """Lay tensors into a flat buffer; every element between and after them is +0.

    Args:
        tensors: any shapes, one dtype.
        like: 1-D, the same dtype, at least as long as the end of the last tensor; gives the length.
        slot: alignment in elements, at least 1.

    Returns:
        A new buffer.
    """
    *starts, _end = _fitting("flatten", like, tensors, slot)
    flat = torch.zeros_like(like)
    for tensor, start in zip(tensors, starts, strict=True):
        flat[start : start + tensor.numel()] = tensor.reshape(-1)
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor], *, slot: int) -> list[Tensor]:
    """Read tensors back from a flat buffer: the inverse of `flatten`.

    Args:
        flat: 1-D.
        like: tensors that give the shapes.
        slot: alignment in elements, at least 1.

    Returns:
        New tensors.
    """
    *starts, _end = _fitting("unflatten", flat, like, slot)
    rows = zip(like, starts, strict=True)
    return [flat[at : at + one.numel()].reshape(one.shape).clone() for one, at in rows]


def _fitting(where: str, buffer: Tensor, tensors: Sequence[Tensor], slot: int) -> list[int]:
    """Return the offsets; refuse a buffer that is too short or of another dtype."""
    places = offsets([tensor.numel() for tensor in tensors], slot)
    if buffer.numel() < places[-1]:
        raise ValueError(
            f"flat has {buffer.numel()} elements, but should have at least {places[-1]} "
            f"for {len(tensors)} tensors in slots of {slot} [{where}]"
        )
    for index, tensor in enumerate(tensors):
        if tensor.dtype != buffer.dtype:
            raise ValueError(
                f"tensors[{index}] is {tensor.dtype}, but should be {buffer.dtype} "
                f"like flat [{where}]"
            )
    return places


def cast_copy(sources: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Round each source to a dtype, to nearest, ties to even.

    Args:
        sources: fp32 (or narrower), any shapes.
        dtypes: one per source.

    Returns:
        New tensors. Values past the range of the dtype become infinite; -0.0 stays -0.0.
    """
    return [fp32(source).to(dtype) for source, dtype in zip(sources, dtypes, strict=True)]
