"""LAMB in two sweeps of Triton, the direction kept between them: right, or with narrow offsets."""

import torch
import triton
import triton.language as tl

from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import LambCall, skipped
from twinstep.parity.proof.corpus.lamb import step_size

BLOCK = 1024


@triton.jit
def first_of(SIZE: tl.constexpr, NARROW: tl.constexpr):
    """The first element of a program; NARROW is a product that wraps."""
    return (tl.program_id(0) if NARROW else tl.program_id(0).to(tl.int64)) * SIZE


@triton.jit(do_not_specialize=["numel"])
def directions_kernel(
    p,
    g,
    m,
    v,
    u,
    sums,
    numel,
    b1,
    b2,
    c1,
    c2,
    eps,
    wd,
    factor,
    INSIDE: tl.constexpr,
    SIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Moments, direction, and two sums of squares in float64 for each program."""
    at = first_of(SIZE, NARROW) + tl.arange(0, SIZE)
    here = at < numel
    weight = tl.load(p + at, here, 0.0).to(tl.float32)
    h = tl.load(g + at, here, 0.0).to(tl.float32) * factor
    first = b1 * tl.load(m + at, here, 0.0) + c1 * h
    second = b2 * tl.load(v + at, here, 0.0) + (c2 * h) * h
    root = tl.sqrt_rn(second + eps if INSIDE else second)
    way = tl.where(here, tl.div_rn(first, root if INSIDE else root + eps) + wd * weight, 0.0)
    tl.store(m + at, first, here)
    tl.store(v + at, second, here)
    tl.store(u + at, way, here)
    own = sums + 2 * tl.program_id(0)
    tl.store(own, tl.sum(weight.to(tl.float64) * weight))
    tl.store(own + 1, tl.sum(way.to(tl.float64) * way))


@triton.jit(do_not_specialize=["numel"])
def weights_kernel(p, u, c, numel, a, COPY: tl.constexpr, SIZE: tl.constexpr, NARROW: tl.constexpr):
    """Weights and copies."""
    at = first_of(SIZE, NARROW) + tl.arange(0, SIZE)
    here = at < numel
    new = tl.load(p + at, here).to(tl.float32) - a * tl.load(u + at, here)
    tl.store(p + at, new.to(p.dtype.element_ty), here)
    if COPY:
        tl.store(c + at, new.to(c.dtype.element_ty), here)


def lamb_in_two_sweeps(call: LambCall, narrow: bool = False) -> None:
    """The step over every tensor, unless it is skipped; programs of `BLOCK` elements."""
    if skipped(call):
        return
    beta1, beta2 = float(call.beta1), float(call.beta2)
    betas = (beta1, beta2, 1.0 - beta1, 1.0 - beta2)
    rest = (float(call.eps), float(call.weight_decay), float(call.factor))
    for i, (p, step) in enumerate(zip(call.params, call.steps, strict=True)):
        step.add_(1)
        if not (n := p.numel()):
            continue
        u = torch.empty_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
        grid = (triton.cdiv(n, BLOCK),)
        sums = torch.empty(grid[0], 2, dtype=torch.float64, device=p.device)
        state = (call.grads[i], call.exp_avgs[i], call.exp_avg_sqs[i])
        how = {"SIZE": BLOCK, "NARROW": narrow, "enable_fp_fusion": False}
        inside = call.eps_inside_sqrt
        directions_kernel[grid](p, *state, u, sums, n, *betas, *rest, INSIDE=inside, **how)
        w, direction = sums.sum(0).sqrt().float()
        rho = torch.ones(())
        if w and direction:
            rho = (w / direction).minimum(fp32(call.max_coeff)).maximum(fp32(call.min_coeff))
        a = float(step_size(call, int(step)) * rho)
        copy = call.copies[i] if call.copies else p
        weights_kernel[grid](p, u, copy, n, a, COPY=bool(call.copies), **how)
