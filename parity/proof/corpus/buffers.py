"""Correct flatten, unflatten, accumulate and cast_copy in plain torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    CastCopyCall,
    FlattenCall,
    Tensors,
    UnflattenCall,
)


def starts(tensors: Tensors, slot: int) -> list[int]:
    """Offsets of the tensors: each starts at the next multiple of `slot`."""
    places, end = [], 0
    for t in tensors:
        start = -(-end // slot) * slot
        places.append(start)
        end = start + t.numel()
    return places


def flatten(call: FlattenCall, places: Callable[[Tensors, int], list[int]] = starts) -> None:
    """Zeros everywhere, then each tensor at its place."""
    call.flat[0].zero_()
    lay(call, places(call.tensors, call.slot))


def lay(call: FlattenCall, places: list[int]) -> None:
    """Each tensor at its place; what lies between is not touched."""
    for t, start in zip(call.tensors, places, strict=True):
        room = call.flat[0][start : start + t.numel()]
        # In another order the gaps differ, and the last tensor may not fit.
        room.copy_(t.reshape(-1)[: room.numel()])


def unflatten(call: UnflattenCall, places: Callable[[Tensors, int], list[int]] = starts) -> None:
    """Each tensor read from its place."""
    for t, start in zip(call.tensors, places(call.tensors, call.slot), strict=True):
        t.copy_(call.flat[0][start : start + t.numel()].reshape(t.shape))


def added(a: Tensor, g: Tensor) -> Tensor:
    """fp32(a) + fp32(g), rounded once by the store."""
    return fp32(a) + fp32(g)


def accumulate(call: AccumulateCall, total: Callable[[Tensor, Tensor], Tensor] = added) -> None:
    """Every gradient added to its accumulator."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        a.copy_(total(a, g))


def nearest_even(source: Tensor) -> Tensor:
    """The fp32 value, unchanged: the store rounds it to nearest, ties to even."""
    return source


def cast_copy(call: CastCopyCall, prepared: Callable[[Tensor], Tensor] = nearest_even) -> None:
    """Every source rounded once into its copy."""
    for s, c in zip(call.sources, call.copies, strict=True):
        c.copy_(prepared(fp32(s)))
