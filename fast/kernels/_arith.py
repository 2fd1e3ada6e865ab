"""Arithmetic shared by the step kernels: Adam and SGD on a tile, and their coefficients.

Everything here is plain IEEE arithmetic, one rounding per operation: launches pass
`enable_fp_fusion=False`, division and square root are the correctly rounded ones.

A coefficient block is one fp32 tensor: HEADER scalars, then a pair for every tensor of the list
(Adam: 1 - beta1**t and 1 - beta2**t; SGD: 1 on the tensor's first step, else 0, and unused).
"""

import triton
import triton.language as tl

LR = tl.constexpr(0)
WEIGHT_DECAY = tl.constexpr(1)
INV_SCALE = tl.constexpr(2)
FOUND_INF = tl.constexpr(3)
BETA1 = tl.constexpr(4)
BETA2 = tl.constexpr(5)
ONE_MINUS_BETA1 = tl.constexpr(6)
ONE_MINUS_BETA2 = tl.constexpr(7)
EPS = tl.constexpr(8)
MOMENTUM = tl.constexpr(9)
REST = tl.constexpr(10)
HEADER = tl.constexpr(16)
LANES = tl.constexpr(128)


@triton.jit
def power(base, exponents):
    """Return base**exponents (float64 scalar, int64 vector): square and multiply, lowest bit first.

    Lanes whose exponent has run out keep their product, so the lane's own sequence of roundings
    does not depend on its neighbours.
    """
    product = tl.full(exponents.shape, 1.0, tl.float64)
    # One reduction, not one for each bit: whatever the others hold, the largest ends last.
    left = tl.max(exponents)
    while left > 0:
        product = tl.where((exponents & 1) != 0, product * base, product)
        base = base * base
        exponents = exponents >> 1
        left = left >> 1
    return product


@triton.jit
def step_pointers(steps, lane, mask, IS_TABLE: tl.constexpr):
    """Return pointers to the step counters: `steps` is one counter, or a table of addresses."""
    if IS_TABLE:
        addresses = tl.load(steps + lane, mask=mask, other=0)
        return addresses.to(tl.pointer_type(tl.int64))
    return steps + lane


@triton.jit
def store_adam_header(coefficients, lr, beta1, beta2, eps, weight_decay, inv_scale, found_inf):
    """Round the float64 hyper-parameters of Adam once to fp32 and store them."""
    tl.store(coefficients + LR, lr.to(tl.float32))
    tl.store(coefficients + WEIGHT_DECAY, weight_decay.to(tl.float32))
    tl.store(coefficients + INV_SCALE, inv_scale)
    tl.store(coefficients + FOUND_INF, found_inf)
    tl.store(coefficients + BETA1, beta1.to(tl.float32))
    tl.store(coefficients + BETA2, beta2.to(tl.float32))
    # 1 - beta in float64: in fp32, 1 - fp32(0.999) is off by 2e-5 of itself.
    tl.store(coefficients + ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32))
    tl.store(coefficients + ONE_MINUS_BETA2, (1.0 - beta2).to(tl.float32))
    tl.store(coefficients + EPS, eps.to(tl.float32))


@triton.jit
def advance_adam_steps(
    steps,
    coefficients,
    first,
    tensors,
    beta1,
    beta2,
    found_inf,
    BIAS_CORRECTION: tl.constexpr,
    IS_TABLE: tl.constexpr,
    WIDTH: tl.constexpr = 2,
):
    """Advance LANES step counters from `first` on, unless skipped, and store k1, k2.

    WIDTH: numbers that the block has for each tensor.
    """
    lane = first + tl.arange(0, LANES)
    mask = lane < tensors
    counters = step_pointers(steps, lane, mask, IS_TABLE)
    t = tl.load(counters, mask=mask, other=0) + 1
    pair = coefficients + HEADER + WIDTH * lane
    if BIAS_CORRECTION:
        tl.store(pair, (1.0 - power(beta1, t)).to(tl.float32), mask=mask)
        tl.store(pair + 1, (1.0 - power(beta2, t)).to(tl.float32), mask=mask)
    else:
        tl.store(pair, tl.full([LANES], 1.0, tl.float32), mask=mask)
        tl.store(pair + 1, tl.full([LANES], 1.0, tl.float32), mask=mask)
    if found_inf == 0.0:
        tl.store(counters, t, mask=mask)


@triton.jit
def load_adam_coefficients(coefficients, slot):
    """Return (inv_scale, wd, b1, c1, b2, c2, k1, k2, eps, lr) as fp32 scalars."""
    pair = coefficients + HEADER + 2 * slot
    return (
        tl.load(coefficients + INV_SCALE),
        tl.load(coefficients + WEIGHT_DECAY),
        tl.load(coefficients + BETA1),
        tl.load(coefficients + ONE_MINUS_BETA1),
        tl.load(coefficients + BETA2),
        tl.load(coefficients + ONE_MINUS_BETA2),
        tl.load(pair),
        tl.load(pair + 1),
        tl.load(coefficients + EPS),
        tl.load(coefficients + LR),
    )


@triton.jit
def join_master(weight, remainder):
    """Return the fp32 master of a bf16 weight and its remainder (`reference.remainder`)."""
    upper = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (upper + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_master(master):
    """Return the bf16 weight and the int16 remainder of an fp32 master."""
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where(master == master, bits, 0x7FC00000)
    weight = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return weight, bits.to(tl.int16)


@triton.jit
def adam_tile(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    copies,
    offsets,
    mask,
    coefficients,
    DECOUPLED: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """One Adam step on one tile; `mask` is None where the whole tile exists.

    Copies in int16 are remainders of masters, whose upper halves are the parameters.
    """
    REMAINDER: tl.constexpr = copies.dtype.element_ty == tl.int16
    inv_scale, wd, b1, c1, b2, c2, k1, k2, eps, lr = coefficients
    g = tl.load(grads + offsets, mask=mask).to(tl.float32)
    if REMAINDER:
        p = join_master(tl.load(params + offsets, mask=mask), tl.load(copies + offsets, mask=mask))
    else:
        p = tl.load(params + offsets, mask=mask).to(tl.float32)
    m = tl.load(exp_avgs + offsets, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sqs + offsets, mask=mask).to(tl.float32)
    g = g * inv_scale
    if not DECOUPLED:
        g = g + wd * p
    m = b1 * m + c1 * g
    v = b2 * v + (c2 * g) * g
    u = tl.div_rn(tl.div_rn(m, k1), tl.sqrt_rn(tl.div_rn(v, k2)) + eps)
    if DECOUPLED:
        u = u + wd * p
    p = p - lr * u
    tl.store(exp_avgs + offsets, m.to(exp_avgs.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sqs + offsets, v.to(exp_avg_sqs.dtype.element_ty), mask=mask)
    if REMAINDER:
        weight, rest = split_master(p)
        tl.store(params + offsets, weight, mask=mask)
        tl.store(copies + offsets, rest, mask=mask)
    else:
        tl.store(params + offsets, p.to(params.dtype.element_ty), mask=mask)
        if HAS_COPY:
            # Rounded from the fp32 value, not from a 16-bit parameter: one rounding, not two.
            tl.store(copies + offsets, p.to(copies.dtype.element_ty), mask=mask)


@triton.jit
def load_sgd_coefficients(coefficients, slot):
    """Return (inv_scale, wd, momentum, rest, first, lr) as fp32 scalars."""
    return (
        tl.load(coefficients + INV_SCALE),
        tl.load(coefficients + WEIGHT_DECAY),
        tl.load(coefficients + MOMENTUM),
        tl.load(coefficients + REST),
        tl.load(coefficients + HEADER + 2 * slot),
        tl.load(coefficients + LR),
    )


@triton.jit
def sgd_tile(
    params,
    grads,
    momentums,
    copies,
    offsets,
    mask,
    coefficients,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """One SGD step on one tile; `mask` is None where the whole tile exists."""
    inv_scale, wd, momentum, rest, first, lr = coefficients
    g = tl.load(grads + offsets, mask=mask).to(tl.float32)
    p = tl.load(params + offsets, mask=mask).to(tl.float32)
    g = g * inv_scale
    g = g + wd * p
    d = g
    if HAS_MOMENTUM:
        b = tl.load(momentums + offsets, mask=mask)
        # Selected, not blended: on the first step the buffer may hold anything, NaN included.
        b = tl.where(first != 0.0, g, momentum * b + rest * g)
        d = b
        if NESTEROV:
            d = g + momentum * b
        tl.store(momentums + offsets, b, mask=mask)
    p = p - lr * d
    tl.store(params + offsets, p.to(params.dtype.element_ty), mask=mask)
    if HAS_COPY:
        tl.store(copies + offsets, p.to(copies.dtype.element_ty), mask=mask)
