"""Operations on gradients and buffers, one row each.

A reference here takes what its kernel takes, written arguments too, and calls the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.parity.operations import arguments, combinations, controls
from twinstep.parity.operations.operation import Bound, Operation
from twinstep.reference import accumulate as accumulation
from twinstep.reference import buffers
from twinstep.reference.norm import l2_norm
from twinstep.reference.parameters import check_lengths
from twinstep.reference.unscale import any_nonfinite
from twinstep.reference.unscale import unscale as unscaled


def unscale(
    grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor
) -> tuple[list[Tensor], Tensor]:
    """`reference.unscale.unscale`, and found_inf: 1.0 if a stored gradient is non-finite."""
    return unscaled(grads, inv_scale=inv_scale), torch.maximum(found_inf, any_nonfinite(grads))


def global_norm(
    grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor
) -> tuple[Tensor, Tensor]:
    """`reference.norm.l2_norm`, and found_inf: 1.0 if a stored gradient is non-finite."""
    del norm
    return l2_norm(grads), torch.maximum(found_inf, any_nonfinite(grads))


def flatten(tensors: Sequence[Tensor], flat: Sequence[Tensor], *, slot: int) -> tuple[list[Tensor]]:
    """`reference.buffers.flatten`; the buffer is a list of one."""
    (like,) = flat
    return ([buffers.flatten(tensors, like, slot=slot)],)


def unflatten(
    flat: Sequence[Tensor], tensors: Sequence[Tensor], *, slot: int
) -> tuple[list[Tensor]]:
    """`reference.buffers.unflatten`; the buffer is a list of one."""
    (buffer,) = flat
    return (buffers.unflatten(buffer, tensors, slot=slot),)


def accumulate(accumulators: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor]]:
    """`reference.accumulate.accumulate`."""
    return (accumulation.accumulate(accumulators, grads),)


def cast_copy(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> tuple[list[Tensor]]:
    """`reference.buffers.cast_copy` to the dtypes of the copies."""
    check_lengths("cast_copy", {"copies": copies, "sources": sources})
    return (buffers.cast_copy(sources, [copy.dtype for copy in copies]),)


UNSCALE = Operation(
    name="unscale",
    summary="Multiply gradients by inv_scale and report overflow.",
    equations=(
        "found_inf = 1 if any stored gradient is inf or NaN, else as it came",
        "grad = fp32(grad) inv_scale, rounded once, non-finite ones too",
    ),
    lists=(arguments.GRADS,),
    controls=(controls.INV_SCALE, controls.FOUND),
    writes=("grads", "found_inf"),
    reference=unscale,
    combinations=combinations.single_combinations("grads"),
    laws=arguments.in_order(*arguments.VALUE_LAWS, "power_of_two", "large_index"),
)

GLOBAL_NORM = Operation(
    name="global_norm",
    summary="Root of the exact sum of squares of all stored gradients, and whether any overflowed.",
    equations=(
        "S = sum of grad^2 as a real number, rounded once to float64",
        "norm = fp32(sqrt(S));  any NaN gives NaN, otherwise any inf gives +inf",
        "found_inf = 1 if any stored gradient is inf or NaN, else as it came",
    ),
    lists=(arguments.GRADS,),
    controls=(controls.NORM_OUT, controls.FOUND),
    writes=("norm", "found_inf"),
    reference=global_norm,
    combinations=combinations.single_combinations("grads"),
    laws=arguments.in_order(*arguments.OUTPUT_LAWS, "power_of_two"),
    bound=Bound.SUM,
)

FLATTEN = Operation(
    name="flatten",
    summary="Lay tensors into a flat buffer.",
    equations=(
        "tensor i starts at the first multiple of slot at or after the end of tensor i - 1",
        "flat ends where the last tensor does, or later",
        "every element between and behind the tensors becomes +0",
    ),
    lists=(arguments.TENSORS, arguments.FLAT_OUT),
    options=(arguments.SLOT,),
    writes=("flat",),
    reference=flatten,
    combinations=combinations.pack_combinations(),
    laws=arguments.PACK_LAWS,
    bound=Bound.EXACT,
)

UNFLATTEN = Operation(
    name="unflatten",
    summary="Read tensors back from a flat buffer.",
    equations=("tensor i is read where flatten puts it",),
    lists=(arguments.FLAT, arguments.TENSORS_OUT),
    options=(arguments.SLOT,),
    writes=("tensors",),
    reference=unflatten,
    combinations=combinations.pack_combinations(),
    laws=arguments.PACK_LAWS,
    bound=Bound.EXACT,
)

ACCUMULATE = Operation(
    name="accumulate",
    summary="Add gradients to their accumulators.",
    equations=("a = fp32(a) + fp32(g), rounded once",),
    lists=(arguments.ACCUMULATORS, arguments.GRADS),
    writes=("accumulators",),
    reference=accumulate,
    combinations=combinations.accumulate_combinations(),
    laws=arguments.in_order(*arguments.VALUE_LAWS, "large_index"),
)

CAST_COPY = Operation(
    name="cast_copy",
    summary="Round master weights to the dtype of the model weights.",
    equations=("c = fp32(s), rounded once to nearest, ties to even",),
    lists=(arguments.SOURCES, arguments.CAST_OUT),
    writes=("copies",),
    reference=cast_copy,
    combinations=combinations.cast_combinations(),
    laws=arguments.in_order(*arguments.OUTPUT_LAWS, "large_index"),
    bound=Bound.EXACT,
)
