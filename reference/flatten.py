"""Flat buffers: tensors laid end to end, each starting at a multiple of `slot` elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def offsets(numels: Sequence[int], slot: int) -> list[int]:
    """Where each tensor starts: the first multiple of slot at or after the end of the one before.

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


def flatten(tensors: Sequence[Tensor], flat: Sequence[Tensor], *, slot: int) -> tuple[list[Tensor]]:
    """Lay tensors into a flat buffer; every element between and behind them becomes +0.

    Args:
        tensors: any shapes, one dtype.
        flat: the buffer, a list of one, 1-D, the same dtype, at least as long as the end of the
            last tensor; its contents are written, never read.
        slot: alignment in elements, at least 1.

    Returns:
        The new buffer, a list of one.
    """
    (buffer,) = flat
    *starts, end = _fitting("flatten", buffer, tensors, slot)
    pieces, at = [], 0
    for tensor, start in zip(tensors, starts, strict=True):
        pieces += [torch.zeros(start - at, dtype=buffer.dtype), tensor.reshape(-1)]
        at = start + tensor.numel()
    pieces.append(torch.zeros(buffer.numel() - end, dtype=buffer.dtype))
    return ([torch.cat(pieces)],)


def unflatten(
    flat: Sequence[Tensor], tensors: Sequence[Tensor], *, slot: int
) -> tuple[list[Tensor]]:
    """Read tensors back from a flat buffer: the inverse of `flatten`.

    Args:
        flat: the buffer, a list of one, 1-D.
        tensors: give the shapes; their contents are written, never read.
        slot: alignment in elements, at least 1.

    Returns:
        New tensors, shaped like the given ones.
    """
    (buffer,) = flat
    *starts, _end = _fitting("unflatten", buffer, tensors, slot)
    rows = zip(tensors, starts, strict=True)
    return ([buffer[at : at + like.numel()].reshape(like.shape).clone() for like, at in rows],)


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
