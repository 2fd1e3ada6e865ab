"""Two sweeps over memory, as both LAMBs take them: moments with both sums of squares, then weights.

A program has one span of one tensor. What a direction is made of is a FORM (`fast.kernels._lamb`).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._lamb import lamb_direction, lamb_moments
from twinstep.fast.kernels._layout import TILE, address_of, facts_of, pointer
from twinstep.fast.kernels._limbs import PADDED, add_tile
from twinstep.fast.kernels.reduce import store_limbs
from twinstep.fast.runtime.compiled import Jitted
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, launch
from twinstep.fast.runtime.tables import SHARED, TableCache, tensor_tables

SPAN = tl.constexpr(16384)  # elements for each program


@triton.jit
def span_of(table, tensors, DEPTH: tl.constexpr):
    """Return (first element, end, elements, whether aligned, slot) of this program's span.

    With it the addresses of four rows of its tensor; where there are three, the last comes twice.
    """
    pair = table + (DEPTH + 3) * tensors + 2 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(pair)
    start = tl.load(pair + 1) * SPAN
    numel, aligned, slot = facts_of(table, tensors, tensor, DEPTH)
    first = address_of(table, tensors, tensor, 0)
    second = address_of(table, tensors, tensor, 1)
    third = address_of(table, tensors, tensor, 2)
    last = address_of(table, tensors, tensor, DEPTH - 1)
    span = (start, tl.minimum(start + SPAN, numel), numel, aligned, slot)
    return span, (first, second, third, last)


@triton.jit
def sweep_moments(
    limbs,
    span,
    rows,
    coefficients,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    FORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Moments of one span, and its squares of weights and direction added to the two sums."""
    start, stop, numel, aligned, slot = span
    p, g, m, v = rows
    weights = tl.zeros([PADDED], tl.int64)
    directions = tl.zeros([PADDED], tl.int64)
    while start < stop:
        at = start + tl.arange(0, WIDE)
        if (aligned != 0) & (start + WIDE <= numel):
            w, u = lamb_moments(
                pointer(p, P, True),
                pointer(g, G, True),
                pointer(m, M, True),
                pointer(v, M, True),
                at,
                None,
                coefficients,
                FORM,
            )
        else:
            inside = at < numel
            w, u = lamb_moments(
                pointer(p, P, False),
                pointer(g, G, False),
                pointer(m, M, False),
                pointer(v, M, False),
                at,
                inside,
                coefficients,
                FORM,
            )
            # Behind the end m / d is 0 / 0 where eps is 0, and one NaN would be the norm.
            w = tl.where(inside, w, 0.0)
            u = tl.where(inside, u, 0.0)
        weights = add_tile(weights, w, True)
        directions = add_tile(directions, u, True)
        start += WIDE
    sums = limbs + 2 * PADDED * slot
    store_limbs(sums, weights)
    store_limbs(sums + PADDED, directions)


@triton.jit
def sweep_weights(
    span,
    rows,
    length,
    coefficients,
    P: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """Weights of one span, from its moments and the length of its tensor's step."""
    start, stop, numel, aligned, _ = span
    p, m, v, low = rows
    while start < stop:
        at = start + tl.arange(0, TILE)
        if (aligned != 0) & (start + TILE <= numel):
            weights = pointer(p, P, True)
            w = tl.load(weights + at).to(tl.float32)
            first = tl.load(pointer(m, M, True) + at)
            second = tl.load(pointer(v, M, True) + at)
            w = w - length * lamb_direction(w, first, second, coefficients, FORM)
            tl.store(weights + at, w.to(P))
            if HAS_COPY:
                tl.store(pointer(low, C, True) + at, w.to(C))
        else:
            inside = at < numel
            weights = pointer(p, P, False)
            w = tl.load(weights + at, mask=inside).to(tl.float32)
            first = tl.load(pointer(m, M, False) + at, mask=inside)
            second = tl.load(pointer(v, M, False) + at, mask=inside)
            w = w - length * lamb_direction(w, first, second, coefficients, FORM)
            tl.store(weights + at, w.to(P), mask=inside)
            if HAS_COPY:
                tl.store(pointer(low, C, False) + at, w.to(C), mask=inside)
        start += TILE


def sweep_twice(
    sweeps: tuple[Jitted, Jitted],
    ratio: Callable[[Tensor], None],
    lists: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
    coefficients: Tensor,
    form: Mapping[str, bool],
    *,
    warps: int = 8,
    cache: TableCache = SHARED,
    shared: bool = False,
) -> None:
    """Run a LAMB's launches after its first: moments, the length of each step, weights.

    Args:
        sweeps: kernels of the moments and of the weights.
        ratio: launches the kernel between them; takes both sums of each tensor.
        lists: params, grads, exp_avgs, exp_avg_sqs.
        copies: low-precision model weights, or none.
        coefficients: the block that the first launch wrote.
        form: what else both kernels are compiled with.
        warps: of a program of the moments.
        cache: of pointer tables.
        shared: as in `update_lamb`.
    """
    moments, weights = sweeps
    params, _, exp_avgs, exp_avg_sqs = lists
    count = 1 if shared else len(params)
    limbs = torch.zeros(count, 2, PADDED.value, dtype=torch.int64, device=coefficients.device)
    for table in tensor_tables(lists, chunk=SPAN.value, cache=cache, shared=shared):
        launch(
            moments,
            table.chunks,
            table.data,
            (table.data, coefficients, limbs, table.tensors),
            reaches=lists,
            warps=warps,
            P=TRITON_DTYPE[table.dtypes[0]],
            G=TRITON_DTYPE[table.dtypes[1]],
            M=TRITON_DTYPE[table.dtypes[2]],
            **form,
        )
    ratio(limbs)
    written = [params, exp_avgs, exp_avg_sqs, *([copies] if len(copies) else [])]
    for table in tensor_tables(written, chunk=SPAN.value, cache=cache, shared=shared):
        launch(
            weights,
            table.chunks,
            table.data,
            (table.data, coefficients, table.tensors),
            reaches=written,
            P=TRITON_DTYPE[table.dtypes[0]],
            M=TRITON_DTYPE[table.dtypes[1]],
            C=TRITON_DTYPE[table.dtypes[-1]],
            **form,
            HAS_COPY=len(copies) > 0,
        )
