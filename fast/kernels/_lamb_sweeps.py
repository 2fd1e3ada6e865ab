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
from twinstep.fast.kernels._squares import (
    FULL,
    SUMS,
    add_squares,
    bits_of,
    constants_of,
    into_limbs,
    misfits,
    no_squares,
    window_above,
)
from twinstep.fast.kernels.reduce import store_limbs
from twinstep.fast.runtime.compiled import Jitted
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, launch
from twinstep.fast.runtime.recorder import note_zeros
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
def moments_at(
    rows,
    at,
    numel,
    coefficients,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the moments of one tile; return its weights and its direction, 0 behind the end."""
    p, g, m, v = rows
    inside = None if WHOLE else at < numel
    w, u = lamb_moments(
        pointer(p, P, WHOLE),
        pointer(g, G, WHOLE),
        pointer(m, M, WHOLE),
        pointer(v, M, WHOLE),
        at,
        inside,
        coefficients,
        FORM,
    )
    if not WHOLE:
        # Behind the end m / d is 0 / 0 where eps is 0, and one NaN would be the norm.
        w = tl.where(inside, w, 0.0)
        u = tl.where(inside, u, 0.0)
    return w, u


@triton.jit
def add_both(sums, w, u, windows):
    """Add a tile's squares of weights and direction to every lane's sums."""
    w0, w1, w2, u0, u1, u2, above, below = sums
    of_w, of_u = windows
    w0, w1, w2, above, below = add_squares(w0, w1, w2, above, below, w, of_w, FULL)
    u0, u1, u2, above, below = add_squares(u0, u1, u2, above, below, u, of_u, FULL)
    return w0, w1, w2, u0, u1, u2, above, below


@triton.jit
def window_of_tile(x):
    """Return the exponent of the window that a tile of fp32 numbers shows."""
    return window_above(tl.max(bits_of(tl.abs(x))), FULL)


@triton.jit
def sum_again(
    start,
    stop,
    numel,
    rows,
    coefficients,
    P: tl.constexpr,
    M: tl.constexpr,
    FORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return limbs of both sums of a span whose moments have been written."""
    # Other threads of this program have written what is read here.
    tl.debug_barrier()
    p, _, m, v = rows
    weights = tl.zeros([PADDED], tl.int64)
    directions = tl.zeros([PADDED], tl.int64)
    while start < stop:
        at = start + tl.arange(0, WIDE)
        inside = at < numel
        w = tl.load(pointer(p, P, False) + at, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(pointer(m, M, False) + at, mask=inside)
        second = tl.load(pointer(v, M, False) + at, mask=inside)
        u = tl.where(inside, lamb_direction(w, first, second, coefficients, FORM), 0.0)
        weights = add_tile(weights, w, True)
        directions = add_tile(directions, u, True)
        start += WIDE
    return weights, directions


@triton.jit
def both_limbs(
    sums,
    windows,
    start,
    stop,
    numel,
    rows,
    coefficients,
    P: tl.constexpr,
    M: tl.constexpr,
    FORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return limbs of both sums, from those of the lanes if every number did fit."""
    w0, w1, w2, u0, u1, u2, above, below = sums
    of_w, of_u = windows
    if misfits(above, below, FULL):
        weights, directions = sum_again(start, stop, numel, rows, coefficients, P, M, FORM, WIDE)
    else:
        nothing = tl.zeros([PADDED], tl.int64)
        weights = into_limbs(nothing, (w0, w1, w2), 0, of_w, FULL)
        directions = into_limbs(nothing, (u0, u1, u2), 0, of_u, FULL)
    return weights, directions


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
    """Moments of one span, and its squares of weights and direction added to the two sums.

    The first tile shows the windows of both sums (`fast.kernels._squares`). Where a number does
    not fit, the span is read again: its direction follows from the moments that are there now.
    """
    start, stop, numel, aligned, slot = span
    at = start + tl.arange(0, WIDE)
    if (aligned != 0) & (start + WIDE <= numel):
        w, u = moments_at(rows, at, numel, coefficients, P, G, M, FORM, True)
    else:
        w, u = moments_at(rows, at, numel, coefficients, P, G, M, FORM, False)
    of_w = window_of_tile(w)
    of_u = window_of_tile(u)
    windows = (constants_of(of_w, FULL), constants_of(of_u, FULL))
    nothing = tl.zeros([SUMS], tl.int32)
    w0, w1, w2 = no_squares()
    u0, u1, u2 = no_squares()
    sums = add_both((w0, w1, w2, u0, u1, u2, nothing, nothing), w, u, windows)
    here = start + WIDE
    whole = tl.where(aligned != 0, stop - (stop - start) % WIDE, here)
    while here < whole:
        at = here + tl.arange(0, WIDE)
        w, u = moments_at(rows, at, numel, coefficients, P, G, M, FORM, True)
        sums = add_both(sums, w, u, windows)
        here += WIDE
    while here < stop:
        at = here + tl.arange(0, WIDE)
        w, u = moments_at(rows, at, numel, coefficients, P, G, M, FORM, False)
        sums = add_both(sums, w, u, windows)
        here += WIDE
    weights, directions = both_limbs(
        sums, (of_w, of_u), start, stop, numel, rows, coefficients, P, M, FORM, WIDE
    )
    total = limbs + 2 * PADDED * slot
    store_limbs(total, weights)
    store_limbs(total + PADDED, directions)


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
    note_zeros(limbs)
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
