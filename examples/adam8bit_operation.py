"""8-bit Adam as a new operation: moments kept as integer codes with one scale for 64 of them.

parity check adam8bit_operation.py
"""

import torch
import triton
import triton.language as tl

from twinstep.parity import register, register_operation
from twinstep.parity.operations.arguments import GRADS, PARAMS, STEPS
from twinstep.parity.operations.controls import BETA1, BETA2, EPS, FACTOR, LR, SKIP
from twinstep.parity.operations.operation import ListArgument, Operation, Role

BLOCK = 64


def count(shape):
    """Blocks of a tensor, the last one perhaps not full."""
    return (-(-torch.Size(shape).numel() // BLOCK),)


def blocks(x):
    """One row for each block; zeros behind the last element."""
    return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % BLOCK)).reshape(-1, BLOCK)


def scaled(x):
    """Largest magnitude of every block, and the blocks divided by it."""
    rows = blocks(x)
    scale = rows.abs().amax(1)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, rows / safe.unsqueeze(1)


def codes(rows, like):
    """Rounded to nearest, in the shape and dtype of the old codes."""
    return rows.round().to(like.dtype).reshape(-1)[: like.numel()].reshape(like.shape)


def one(p, g, mc, ms, vc, vs, t, lr, beta1, beta2, eps, factor):
    """New weight, codes and scales: m = scale code / 127, v = scale (code / 255)^2."""
    lr, b1, b2, eps = (x.float() for x in (lr, beta1, beta2, eps))
    c1, c2, k1, k2 = (x.float() for x in (1 - beta1, 1 - beta2, 1 - beta1**t, 1 - beta2**t))
    g, root = blocks(g.float() * factor), blocks(vc.float()) / 255
    m = b1 * (ms.unsqueeze(1) * (blocks(mc.float()) / 127)) + c1 * g
    v = b2 * (vs.unsqueeze(1) * (root * root)) + c2 * (g * g)
    u = (m / k1) / (torch.sqrt(v / k2) + eps)
    (ms, m), (vs, v) = scaled(m), scaled(v)
    w = p.float() - lr * u.reshape(-1)[: p.numel()].reshape(p.shape)
    return w.to(p.dtype), codes(m * 127, mc), ms, codes(torch.sqrt(v) * 255, vc), vs


def adam8bit_step(
    params, grads, m_codes, m_scales, v_codes, v_scales, steps,
    *, lr, beta1, beta2, eps, factor, found_inf,
):  # fmt: skip
    """Mutates nothing; returns one entry for each written argument, in their order."""
    state = (params, m_codes, m_scales, v_codes, v_scales)
    if found_inf.item() != 0:
        return tuple([x.clone() for x in row] for row in (*state, steps))
    new = [
        one(p, g, mc, ms, vc, vs, step + 1, lr, beta1, beta2, eps, factor)
        for p, g, mc, ms, vc, vs, step in zip(params, grads, *state[1:], steps, strict=True)
    ]
    return *([row[i] for row in new] for i in range(5)), [step + 1 for step in steps]


FP32, BF16, FP16 = (torch.float32,), (torch.bfloat16,), (torch.float16,)
STATE = {"m_codes": (torch.int8,), "m_scales": FP32, "v_codes": (torch.uint8,), "v_scales": FP32}
STATE["steps"] = (torch.int64,)
register_operation(
    Operation(
        name="adam8bit_step",
        summary="Adam with moments of 8 bits and one scale for 64 elements.",
        equations=(
            "m = beta1 m_scale m_code / 127 + (1 - beta1) g",
            "v = beta2 v_scale (v_code / 255)^2 + (1 - beta2) g^2",
            "p = p - lr (m / k1) / (sqrt(v / k2) + eps)",
            "m_scale = max |m|, m_code = round(127 m / m_scale), of every 64 elements",
            "v_scale = max v, v_code = round(255 sqrt(v / v_scale))",
        ),
        lists=(
            PARAMS,
            GRADS,
            ListArgument(name="m_codes", role=Role.CODE),
            ListArgument(name="m_scales", role=Role.SCALE, shape=count),
            ListArgument(name="v_codes", role=Role.CODE),
            ListArgument(name="v_scales", role=Role.SCALE, shape=count),
            STEPS,
        ),
        controls=(LR, BETA1, BETA2, EPS, FACTOR, SKIP),
        writes=("params", "m_codes", "m_scales", "v_codes", "v_scales", "steps"),
        reference=adam8bit_step,
        combinations={
            "fp32": {"params": FP32, "grads": FP32, **STATE},
            "bf16": {"params": FP32, "grads": BF16, **STATE},
        },
        laws=(
            "value", "nothing_else_written", "skipped_step", "after_skip", "non_finite",
            "boundary_sizes", "alignment", "permutation", "repeat", "race_free", "process_state",
        ),
    )
)  # fmt: skip


@triton.jit
def nearest(x):
    """The nearest integer, up to 2^22: the sum has no bits left for fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def larger(a, b):
    """The larger of two, or NaN, which tl.max leaves out."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def kernel(
    p_ptr, g_ptr, mc_ptr, ms_ptr, vc_ptr, vs_ptr, n, lr, b1, b2, c1, c2, k1, k2, eps, factor,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dequantise, step and quantise again, in registers."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(g_ptr + at, mask=inside, other=0).to(tl.float32) * factor
    root = tl.load(vc_ptr + at, mask=inside, other=0).to(tl.float32) / 255
    code = tl.load(mc_ptr + at, mask=inside, other=0).to(tl.float32)
    m = b1 * (tl.load(ms_ptr + row) * (code / 127)) + c1 * g
    v = b2 * (tl.load(vs_ptr + row) * (root * root)) + c2 * (g * g)
    u = (m / k1) / (tl.sqrt(v / k2) + eps)
    p = tl.load(p_ptr + at, mask=inside)
    tl.store(p_ptr + at, p - lr * u, mask=inside)
    ms, vs = tl.reduce(tl.abs(m), 0, larger), tl.reduce(v, 0, larger)
    tl.store(ms_ptr + row, ms)
    tl.store(vs_ptr + row, vs)
    m = m / tl.where(ms == 0, 1.0, ms) * 127
    v = tl.sqrt(v / tl.where(vs == 0, 1.0, vs)) * 255
    if ROUNDED:
        m, v = nearest(m), nearest(v)
    tl.store(mc_ptr + at, m.to(tl.int8), mask=inside)
    tl.store(vc_ptr + at, v.to(tl.uint8), mask=inside)


def launch(lists, lr, beta1, beta2, eps, factor, found_inf, rounded):
    """A program for each block, on the device of its tensor."""
    if found_inf.item() != 0:
        return
    b1, b2 = beta1.item(), beta2.item()
    for p, g, mc, ms, vc, vs, step in zip(*lists, strict=True):
        step += 1
        k1, k2 = 1 - b1 ** step.item(), 1 - b2 ** step.item()
        numbers = (lr.item(), b1, b2, 1 - b1, 1 - b2, k1, k2, eps.item(), factor.item())
        if p.numel():
            with torch.cuda.device(p.device):
                kernel[count(p.shape)](p, g, mc, ms, vc, vs, p.numel(), *numbers, rounded, BLOCK)


@register("adam8bit_step", name="right_adam8bit")
def right_adam8bit(*lists, lr, beta1, beta2, eps, factor, found_inf):
    """Rounds every code to nearest."""
    launch(lists, lr, beta1, beta2, eps, factor, found_inf, True)


@register("adam8bit_step", name="wrong_adam8bit")
def wrong_adam8bit(*lists, lr, beta1, beta2, eps, factor, found_inf):
    """Cuts codes off instead of rounding them: moments shrink with every step."""
    launch(lists, lr, beta1, beta2, eps, factor, found_inf, False)
