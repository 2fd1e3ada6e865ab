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

Forming u twice costs 4 bytes per parameter less than keeping it. The sums are exact, by integers in
a window of each span's own (`fast.kernels._squares`), so that neither the grid nor the order of
chunks can matter; joining or cutting tensors does.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import FOUND_INF, HEADER, LANES
from twinstep.fast.kernels._lamb import (
    EPS_OUTSIDE,
    EPS_UNDER,
    advance_lamb_steps,
    load_lamb_coefficients,
    store_lamb_header,
    trust_ratio,
)
from twinstep.fast.kernels._lamb_sweeps import (
    span_of,
    sweep_moments,
    sweep_twice,
    sweep_weights,
)
from twinstep.fast.kernels._limbs import PADDED
from twinstep.fast.kernels._prepare import prepared
from twinstep.fast.runtime.checks import require_step
from twinstep.fast.runtime.dispatch import launch
from twinstep.fast.runtime.tables import SHARED, TableCache

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
WIDE = tl.constexpr(1024)  # elements that are summed at once


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
    span, rows = span_of(table, tensors, 4)
    if found_inf != 0.0:
        return
    FORM: tl.constexpr = EPS_UNDER if EPS_INSIDE else EPS_OUTSIDE
    sweep_moments(limbs, span, rows, c, P, G, M, FORM, WIDE)


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
    span, rows = span_of(table, tensors, 4 if HAS_COPY else 3)
    length = tl.load(coefficients + HEADER + 2 * span[4] + 1)
    if found_inf != 0.0:
        return
    FORM: tl.constexpr = EPS_UNDER if EPS_INSIDE else EPS_OUTSIDE
    sweep_weights(span, rows, length, c, P, M, C, FORM, HAS_COPY)


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
