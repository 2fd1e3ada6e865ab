"""LAMB: Adam's moments, and a step as long as each tensor's norms allow.

    h = fp32(grad) * factor
    m = b1 * m + c1 * h;  v = b2 * v + (c2 * h) * h
    u = m / (sqrt(v) + eps), or m / sqrt(v + eps);  u = u + wd * p
    rho = max(min(|p| / |u|, max_coeff), min_coeff);  1 where either norm is 0
    p = p - (a * rho) * u, a the step size with both bias corrections in it

Four launches over tensors found through a pointer table:

1. prepare: coefficients, and the step counters advance.
2. moments: writes m and v, and adds the squares of the weights and of the direction u to limbs, one
   pair of sums for each tensor. Reads 2 + 4 + 4 + 4, writes 4 + 4 bytes per parameter: 22.
3. ratio: one program for each tensor rounds its two sums and forms the length of its step.
4. weights: forms u again from what the second launch left, and writes p and the copy. Reads
   4 + 4 + 4, writes 4 + 2: 18.

Forming u twice costs 4 bytes per parameter less than keeping it. The sums are exact, so that
neither the grid nor the order of chunks can matter; joining or cutting tensors does.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import FOUND_INF, HEADER, LANES
from twinstep.fast.kernels._lamb import (
    EPS_OUTSIDE,
    EPS_UNDER,
    advance_lamb_steps,
    lamb_direction,
    lamb_moments,
    load_lamb_coefficients,
    store_lamb_header,
    trust_ratio,
)
from twinstep.fast.kernels._layout import TILE, address_of, facts_of, pointer
from twinstep.fast.kernels._limbs import PADDED, add_tile
from twinstep.fast.kernels._prepare import prepared
from twinstep.fast.kernels.reduce import store_limbs
from twinstep.fast.runtime.checks import require_step
from twinstep.fast.runtime.compiled import Jitted
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, launch
from twinstep.fast.runtime.tables import SHARED, TableCache, tensor_tables

CONTROLS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "max_coeff",
    "min_coeff",
    "factor",
    "found_inf",
)
WIDE = tl.constexpr(2048)  # elements that are summed at once
SPAN = tl.constexpr(16384)  # elements for each program
SUM_WARPS = 8


@triton.jit(
    do_not_specialize=["tensors"],
    do_not_specialize_on_alignment=["steps", "coefficients", *CONTROLS],
)
def lamb_prepare_kernel(
    steps,
    coefficients,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    max_coeff,
    min_coeff,
    factor,
    found_inf,
    tensors: tl.int64,
    BIAS_CORRECTION: tl.constexpr,
    IS_TABLE: tl.constexpr,
):
    """Form the coefficient block and advance the step counters, LANES for each program."""
    found = tl.load(found_inf)
    rate = tl.load(lr)
    b1 = tl.load(beta1)
    b2 = tl.load(beta2)
    if tl.program_id(0) == 0:
        bounds = (tl.load(max_coeff), tl.load(min_coeff))
        decay = tl.load(weight_decay)
        store_lamb_header(coefficients, b1, b2, tl.load(eps), decay, bounds, tl.load(factor), found)
    first = tl.program_id(0).to(tl.int64) * LANES
    advance_lamb_steps(
        steps, coefficients, first, tensors, rate, b1, b2, found, BIAS_CORRECTION, IS_TABLE
    )


@triton.jit
def span_of(table, tensors, DEPTH: tl.constexpr):
    """Return (tensor, first element, end) of this program's span."""
    pair = table + (DEPTH + 3) * tensors + 2 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(pair)
    start = tl.load(pair + 1) * SPAN
    numel, aligned, slot = facts_of(table, tensors, tensor, DEPTH)
    return tensor, start, tl.minimum(start + SPAN, numel), numel, aligned, slot


@triton.jit
def sweep_moments(
    table,
    limbs,
    tensors,
    span,
    coefficients,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    FORM: tl.constexpr,
):
    """Moments of one span, and its squares of weights and direction added to the two sums."""
    tensor, start, stop, numel, aligned, slot = span
    p = address_of(table, tensors, tensor, 0)
    g = address_of(table, tensors, tensor, 1)
    m = address_of(table, tensors, tensor, 2)
    v = address_of(table, tensors, tensor, 3)
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


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table", "coefficients"])
def lamb_moments_kernel(
    table,
    coefficients,
    limbs,
    tensors: tl.int64,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
):
    """Moments, and the squares of weights and direction added to each tensor's two sums."""
    found_inf = tl.load(coefficients + FOUND_INF)
    c = load_lamb_coefficients(coefficients)
    span = span_of(table, tensors, 4)
    if found_inf != 0.0:
        return
    sweep_moments(table, limbs, tensors, span, c, P, G, M, EPS_UNDER if EPS_INSIDE else EPS_OUTSIDE)


@triton.jit(do_not_specialize_on_alignment=["coefficients", "ratios"])
def lamb_ratio_kernel(coefficients, limbs, ratios, KEEPS: tl.constexpr):
    """The length of one tensor's step: its step size times its trust ratio, which may be kept."""
    found_inf = tl.load(coefficients + FOUND_INF)
    if found_inf != 0.0:
        return
    slot = tl.program_id(0).to(tl.int64)
    rho = trust_ratio(limbs + 2 * PADDED * slot, coefficients)
    pair = coefficients + HEADER + 2 * slot
    tl.store(pair + 1, tl.load(pair) * rho)
    if KEEPS:
        tl.store(ratios + slot, rho)


@triton.jit
def sweep_weights(
    table,
    tensors,
    span,
    length,
    coefficients,
    P: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """Weights of one span, from its moments and the length of its tensor's step."""
    tensor, start, stop, numel, aligned, _ = span
    p = address_of(table, tensors, tensor, 0)
    m = address_of(table, tensors, tensor, 1)
    v = address_of(table, tensors, tensor, 2)
    low = address_of(table, tensors, tensor, 3 if HAS_COPY else 2)
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


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table", "coefficients"])
def lamb_weights_kernel(
    table,
    coefficients,
    tensors: tl.int64,
    P: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """The weights, from the moments that `lamb_moments_kernel` left."""
    found_inf = tl.load(coefficients + FOUND_INF)
    c = load_lamb_coefficients(coefficients)
    span = span_of(table, tensors, 4 if HAS_COPY else 3)
    length = tl.load(coefficients + HEADER + 2 * span[5] + 1)
    if found_inf != 0.0:
        return
    FORM: tl.constexpr = EPS_UNDER if EPS_INSIDE else EPS_OUTSIDE
    sweep_weights(table, tensors, span, length, c, P, M, C, FORM, HAS_COPY)


def prepare_lamb(
    steps: Sequence[Tensor],
    controls: Sequence[Tensor],
    *,
    bias_correction: bool,
    cache: TableCache = SHARED,
) -> Tensor:
    """Advance the step counters and return the coefficient block of this step."""
    return prepared(lamb_prepare_kernel, steps, controls, cache, BIAS_CORRECTION=bias_correction)


def update_lamb(
    lists: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
    coefficients: Tensor,
    *,
    eps_inside_sqrt: bool,
    cache: TableCache = SHARED,
    ratios: Tensor | None = None,
    shared: bool = False,
) -> None:
    """Run the three launches over (params, grads, exp_avgs, exp_avg_sqs) and copies.

    `ratios`: fp32, one for each tensor; a step that is not skipped writes the trust ratios there.
    `shared`: the tensors are pieces of one, with one counter, one pair of norms and one ratio.
    """
    kept = coefficients if ratios is None else ratios

    def ratio(limbs: Tensor) -> None:
        args = (coefficients, limbs, kept)
        launch(lamb_ratio_kernel, len(limbs), coefficients, args, warps=1, KEEPS=ratios is not None)

    sweeps = (lamb_moments_kernel, lamb_weights_kernel)
    form = {"EPS_INSIDE": eps_inside_sqrt}
    sweep_twice(sweeps, ratio, lists, copies, coefficients, form, cache=cache, shared=shared)


def sweep_twice(
    sweeps: tuple[Jitted, Jitted],
    ratio: Callable[[Tensor], None],
    lists: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor],
    coefficients: Tensor,
    form: Mapping[str, bool],
    *,
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
            warps=SUM_WARPS,
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


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    max_coeff: Tensor,
    min_coeff: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
    eps_inside_sqrt: bool,
) -> None:
    """One step of LAMB; the norms are of whole tensors, so joining or cutting them matters.

    Args:
        params: weights of any shape, fp32, fp16 or bf16, contiguous, on one device like everything
            else; written.
        grads: fp32, fp16 or bf16.
        exp_avgs: first moments, fp32; written.
        exp_avg_sqs: second moments, fp32; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps, int64, shape (); written.
        lr: learning rate, float64, shape (), like the six that follow.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the square root, or under it.
        weight_decay: of the direction, of either sign.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        factor: multiplies every gradient, fp32, shape ().
        found_inf: not 0 skips the step, and nothing is written; fp32, shape ().
        bias_correction: False uses lr itself as the step size.
        eps_inside_sqrt: True divides by sqrt(v + eps), False by sqrt(v) + eps.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    controls |= {"max_coeff": max_coeff, "min_coeff": min_coeff}
    controls |= {"factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_step("lamb_step_", lists, steps, controls)
    given = [controls[name] for name in CONTROLS]
    coefficients = prepare_lamb(steps, given, bias_correction=bias_correction)
    *required, _ = lists.values()
    update_lamb(required, copies, coefficients, eps_inside_sqrt=eps_inside_sqrt)
