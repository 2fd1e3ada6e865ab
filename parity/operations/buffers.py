"""Operations on gradients and buffers, one row each."""

from __future__ import annotations

import twinstep.reference.accumulate
import twinstep.reference.cast
import twinstep.reference.clip
import twinstep.reference.flatten
import twinstep.reference.overflow
from twinstep.parity.operations import arguments, combinations, controls
from twinstep.parity.operations.operation import Bound, Operation

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
    reference=twinstep.reference.overflow.unscale,
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
    reference=twinstep.reference.clip.global_norm,
    combinations=combinations.single_combinations("grads"),
    laws=arguments.in_order(*arguments.OUTPUT_LAWS, "power_of_two"),
    bound=Bound.SUM,
)

FLATTEN = Operation(
    name="flatten",
    summary="Lay tensors into a flat buffer.",
    equations=(
        "tensor i starts at the first multiple of slot at or after the end of tensor i - 1",
        "every element between and behind the tensors becomes +0",
    ),
    lists=(arguments.TENSORS, arguments.FLAT_OUT),
    options=(arguments.SLOT,),
    writes=("flat",),
    reference=twinstep.reference.flatten.flatten,
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
    reference=twinstep.reference.flatten.unflatten,
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
    reference=twinstep.reference.accumulate.accumulate,
    combinations=combinations.accumulate_combinations(),
    laws=arguments.in_order(*arguments.VALUE_LAWS, "large_index"),
)

CAST_COPY = Operation(
    name="cast_copy",
    summary="Round master weights to the dtype of the model weights.",
    equations=("c = fp32(s), rounded once to nearest, ties to even",),
    lists=(arguments.SOURCES, arguments.CAST_OUT),
    writes=("copies",),
    reference=twinstep.reference.cast.cast_copy,
    combinations=combinations.cast_combinations(),
    laws=arguments.in_order(*arguments.OUTPUT_LAWS, "large_index"),
    bound=Bound.EXACT,
)
