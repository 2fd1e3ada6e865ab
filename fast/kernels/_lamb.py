"""Arithmetic of LAMB, DeepSpeed's and apex's: coefficients, tiles and trust ratios.

The coefficient block is laid out like Adam's (`fast.kernels._arith`), with the bounds of the trust
ratio behind it; the pair of each tensor is its step size a, and a times its trust ratio. apex's has
the divisor of a clipped gradient there, and three numbers for each tensor: 1 - beta1**t,
1 - beta2**t, and its learning rate times its trust ratio.
"""

import triton
import triton.language as tl

from twinstep.fast.kernels._arith import (
    BETA1,
    BETA2,
    EPS,
    HEADER,
    INV_SCALE,
    LANES,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    WEIGHT_DECAY,
    power,
    step_pointers,
    store_adam_header,
)
from twinstep.fast.kernels._limbs import PADDED, norm_of

MAX_COEFF = tl.constexpr(11)
MIN_COEFF = tl.constexpr(12)
DIVISOR = tl.constexpr(11)
TRIPLE = tl.constexpr(3)
# What a direction is: DeepSpeed's with eps outside the root or under it; then apex's, from APEX_L2
# on, with the decay in the gradient or in the direction.
EPS_OUTSIDE = tl.constexpr(0)
EPS_UNDER = tl.constexpr(1)
APEX_L2 = tl.constexpr(2)
APEX_DECOUPLED = tl.constexpr(3)


@triton.jit
def store_lamb_header(coefficients, beta1, beta2, eps, weight_decay, bounds, inv_scale, found_inf):
    """Round the float64 hyper-parameters once to fp32 and store them; the rate is in the pairs."""
    store_adam_header(coefficients, beta1, beta1, beta2, eps, weight_decay, inv_scale, found_inf)
    largest, smallest = bounds
    tl.store(coefficients + MAX_COEFF, largest.to(tl.float32))
    tl.store(coefficients + MIN_COEFF, smallest.to(tl.float32))


@triton.jit
def advance_lamb_steps(
    steps,
    coefficients,
    first,
    tensors,
    lr,
    beta1,
    beta2,
    found_inf,
    BIAS_CORRECTION: tl.constexpr,
    IS_TABLE: tl.constexpr,
):
    """Advance LANES step counters from `first` on, unless skipped, and store step sizes."""
    lane = first + tl.arange(0, LANES)
    mask = lane < tensors
    counters = step_pointers(steps, lane, mask, IS_TABLE)
    t = tl.load(counters, mask=mask, other=0) + 1
    size = tl.full([LANES], 1.0, tl.float64) * lr
    if BIAS_CORRECTION:
        root = tl.sqrt(1.0 - power(beta2, t))
        size = (size * root) / (1.0 - power(beta1, t))
    tl.store(coefficients + HEADER + 2 * lane, size.to(tl.float32), mask=mask)
    if found_inf == 0.0:
        tl.store(counters, t, mask=mask)


@triton.jit
def load_lamb_coefficients(coefficients):
    """Return (inv_scale, wd, b1, c1, b2, c2, eps) as fp32 scalars."""
    return (
        tl.load(coefficients + INV_SCALE),
        tl.load(coefficients + WEIGHT_DECAY),
        tl.load(coefficients + BETA1),
        tl.load(coefficients + ONE_MINUS_BETA1),
        tl.load(coefficients + BETA2),
        tl.load(coefficients + ONE_MINUS_BETA2),
        tl.load(coefficients + EPS),
    )


@triton.jit
def store_apex_header(coefficients, hyper, clip, found_inf, GRAD_AVERAGING: tl.constexpr):
    """Store the hyper-parameters rounded to fp32, and what clipped gradients are divided by."""
    lr, beta1, beta2, eps, weight_decay = hyper
    max_norm, norm, factor = clip
    store_adam_header(coefficients, lr, beta1, beta2, eps, weight_decay, factor, found_inf)
    if not GRAD_AVERAGING:
        tl.store(coefficients + ONE_MINUS_BETA1, 1.0)
    largest = max_norm.to(tl.float32)
    norm = norm * factor
    clips = (largest > 0.0) & (norm > largest)
    tl.store(coefficients + DIVISOR, tl.where(clips, tl.div_rn(norm, largest), 1.0))


@triton.jit
def load_apex_coefficients(coefficients, slot):
    """Return those of `load_lamb_coefficients`, then (divisor, k1, k2), as fp32 scalars."""
    inv_scale, wd, b1, c1, b2, c2, eps = load_lamb_coefficients(coefficients)
    triple = coefficients + HEADER + TRIPLE * slot
    divisor = tl.load(coefficients + DIVISOR)
    return inv_scale, wd, b1, c1, b2, c2, eps, divisor, tl.load(triple), tl.load(triple + 1)


@triton.jit
def lamb_direction(p, m, v, coefficients, FORM: tl.constexpr):
    """Return u from the weights before the step and the moments after it; all fp32."""
    if FORM >= APEX_L2:
        _, wd, _, _, _, _, eps, _, k1, k2 = coefficients
        u = tl.div_rn(tl.div_rn(m, k1), tl.sqrt_rn(tl.div_rn(v, k2)) + eps)
    else:
        _, wd, _, _, _, _, eps = coefficients
        d = tl.sqrt_rn(v + eps) if FORM == EPS_UNDER else tl.sqrt_rn(v) + eps
        u = tl.div_rn(m, d)
    return u if FORM == APEX_L2 else u + wd * p


@triton.jit
def lamb_moments(
    params, grads, exp_avgs, exp_avg_sqs, offsets, mask, coefficients, FORM: tl.constexpr
):
    """Write one tile's moments; return its weights and its direction."""
    inv_scale, wd, b1, c1, b2, c2 = coefficients[:6]
    h = tl.load(grads + offsets, mask=mask).to(tl.float32) * inv_scale
    p = tl.load(params + offsets, mask=mask).to(tl.float32)
    if FORM >= APEX_L2:
        h = tl.div_rn(h, coefficients[7])
    if FORM == APEX_L2:
        h = h + wd * p
    m = b1 * tl.load(exp_avgs + offsets, mask=mask) + c1 * h
    v = b2 * tl.load(exp_avg_sqs + offsets, mask=mask) + (c2 * h) * h
    tl.store(exp_avgs + offsets, m, mask=mask)
    tl.store(exp_avg_sqs + offsets, v, mask=mask)
    return p, lamb_direction(p, m, v, coefficients, FORM)


@triton.jit
def trust_ratio(sums, coefficients):
    """Return |p| / |u| within its bounds; 1 where either is 0."""
    w, _ = norm_of(sums)
    n, _ = norm_of(sums + PADDED)
    largest = tl.load(coefficients + MAX_COEFF)
    smallest = tl.load(coefficients + MIN_COEFF)
    # NaN has to come through both: a minimum that drops it would hide a broken direction.
    rho = tl.minimum(tl.div_rn(w, n), largest, propagate_nan=tl.PropagateNan.ALL)
    rho = tl.maximum(rho, smallest, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((w != 0.0) & (n != 0.0), rho, 1.0)


@triton.jit
def apex_trust_ratio(sums, coefficients, NVLAMB: tl.constexpr):
    """Return |p| / |u|; 1 where either is 0, and without decay unless NVLAMB."""
    w, _ = norm_of(sums)
    n, _ = norm_of(sums + PADDED)
    adapts = (w != 0.0) & (n != 0.0)
    if not NVLAMB:
        adapts = adapts & (tl.load(coefficients + WEIGHT_DECAY) != 0.0)
    return tl.where(adapts, tl.div_rn(w, n), 1.0)
