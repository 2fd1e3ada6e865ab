"""Three small Triton kernels, correct as they stand, with a switch for every fault planted in them.

The switches are compile-time constants, so that each fault is a kernel of its own once compiled.
Launchers take one call record, launch one grid per tensor and keep the step counters on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl

from twinstep.parity.proof.corpus.adam import Scalars, next_count, scalars
from twinstep.parity.proof.corpus.calls import AdamCall, CastCopyCall, UnscaleCall, skipped

# How the last block is masked.
RIGHT, NONE, ONE_MORE, ONE_LESS, WHOLE_BLOCKS = 0, 1, 2, 3, 4
POINTERS = ["p", "g", "m", "v", "c"]


@triton.jit
def owned(at, numel, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """Mask of the offsets that belong to the tensor; wrong on purpose unless MASK is RIGHT."""
    end = numel
    if MASK == 2:
        end = numel + 1
    if MASK == 3:
        end = numel - 1
    if MASK == 4:
        end = numel // BLOCK * BLOCK
    return (at < end) | (MASK == 1)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=POINTERS)
def adamw_kernel(
    p,
    g,
    m,
    v,
    c,
    numel,
    b1,
    b2,
    c1,
    c2,
    k1,
    k2,
    lr,
    eps,
    wd,
    factor,
    BLOCK: tl.constexpr,
    HAS_COPY: tl.constexpr,
    MASK: tl.constexpr,
    IEEE: tl.constexpr,
    IEEE_ROOT: tl.constexpr,
    NARROW_INDEX: tl.constexpr,
    LOST_BLOCK: tl.constexpr,
    NARROW_MOMENTS: tl.constexpr,
    COPY_VIA_FP16: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    MASKED_STORE: tl.constexpr,
):
    """AdamW on one tensor; every switch at its first value is right."""
    block = tl.program_id(0)
    if NARROW_INDEX:
        at = block * BLOCK + tl.arange(0, BLOCK)
    else:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = owned(at, numel, BLOCK, MASK)
    if LOST_BLOCK:
        middle = tl.num_programs(0) // 2
        here = here & ((block != middle) | (middle < 2**20))
    old = tl.load(p + at, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(g + at, mask=here, other=0.0).to(tl.float32) * factor
    first = b1 * tl.load(m + at, mask=here, other=0.0) + c1 * grad
    second = b2 * tl.load(v + at, mask=here, other=0.0) + (c2 * grad) * grad
    if IEEE:
        ratio = tl.div_rn(second, k2)
        root = tl.sqrt_rn(ratio + eps) if EPS_INSIDE else tl.sqrt_rn(ratio) + eps
        u = tl.div_rn(tl.div_rn(first, k1), root)
    else:
        ratio = second / k2
        u = (first / k1) / ((tl.sqrt_rn(ratio) if IEEE_ROOT else tl.sqrt(ratio)) + eps)
    new = old - lr * (u + wd * old)
    if NARROW_MOMENTS:
        first = first.to(g.dtype.element_ty).to(tl.float32)
        second = second.to(g.dtype.element_ty).to(tl.float32)
    stored = here if MASKED_STORE else at >= 0
    tl.store(p + at, new.to(p.dtype.element_ty), mask=stored)
    tl.store(m + at, first, mask=stored)
    tl.store(v + at, second, mask=stored)
    if HAS_COPY:
        low = new.to(tl.float16).to(tl.float32) if COPY_VIA_FP16 else new
        tl.store(c + at, low.to(c.dtype.element_ty), mask=stored)


@dataclass(frozen=True, kw_only=True)
class AdamwLaunch:
    """Options of a launch of `adamw_kernel`; the defaults are right and exact."""

    block: int = 256
    warps: int = 4
    mask: int = RIGHT
    ieee: bool = True
    ieee_root: bool = True
    fusion: bool = False
    narrow_index: bool = False
    lost_block: bool = False
    narrow_moments: bool = False
    copy_via_fp16: bool = False
    eps_inside: bool = False
    masked_store: bool = True
    grid_divisor: int = 1
    rows_for_count: bool = False
    change: Callable[[Scalars, AdamCall, int], Scalars] | None = None


def adamw(call: AdamCall, how: AdamwLaunch = AdamwLaunch()) -> None:  # noqa: B008 - frozen
    """One launch for each tensor that has elements."""
    if skipped(call):
        return
    for i, p in enumerate(call.params):
        numel = p.shape[0] if how.rows_for_count else p.numel()
        blocks = -(-numel // how.block) // how.grid_divisor
        if blocks:
            launch_adamw(call, i, numel, blocks, how)
        call.steps[i].add_(1)


def launch_adamw(call: AdamCall, i: int, numel: int, blocks: int, how: AdamwLaunch) -> None:
    """The update of tensor i."""
    s = scalars(call, next_count(call, i))
    if how.change is not None:
        s = how.change(s, call, next_count(call, i))
    names = ("b1", "b2", "c1", "c2", "k1", "k2", "lr", "eps", "wd")
    adamw_kernel[(blocks,)](
        call.params[i],
        call.grads[i],
        call.exp_avgs[i],
        call.exp_avg_sqs[i],
        call.copies[i] if call.copies else call.params[i],
        numel,
        *(float(getattr(s, name)) for name in names),
        float(call.factor),
        BLOCK=how.block,
        HAS_COPY=bool(call.copies),
        MASK=how.mask,
        IEEE=how.ieee,
        IEEE_ROOT=how.ieee_root,
        NARROW_INDEX=how.narrow_index,
        LOST_BLOCK=how.lost_block,
        NARROW_MOMENTS=how.narrow_moments,
        COPY_VIA_FP16=how.copy_via_fp16,
        EPS_INSIDE=how.eps_inside,
        MASKED_STORE=how.masked_store,
        num_warps=how.warps,
        enable_fp_fusion=how.fusion,
    )


# How a block decides that a gradient is not finite.
BITS, SUM, MAXIMUM, UNMASKED_MAXIMUM = 0, 1, 2, 3


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["g", "found"])
def unscale_kernel(g, found, numel, inv_scale, BLOCK: tl.constexpr, TEST: tl.constexpr):
    """Multiply one tensor by inv_scale and raise `found` where a raw value is not finite."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    raw = tl.load(g + at, mask=here | (TEST == 3), other=0.0)
    x = raw.to(tl.float32)
    if TEST == 1:
        total = tl.sum(x, axis=0)
        bad = (total - total) != 0.0
    elif TEST == 0:
        bad = tl.max(tl.where((x - x) != 0.0, 1, 0), axis=0) != 0
    else:
        bad = tl.max(tl.abs(x), axis=0) == float("inf")
    tl.store(found, 1.0, mask=bad)
    tl.store(g + at, (x * inv_scale).to(g.dtype.element_ty), mask=here)


def unscale(call: UnscaleCall, test: int = BITS, block: int = 256) -> None:
    """One launch for each tensor that has elements."""
    for g in call.grads:
        if g.numel():
            unscale_kernel[(-(-g.numel() // block),)](
                g, call.found_inf, g.numel(), float(call.inv_scale), BLOCK=block, TEST=test
            )


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["s", "c"])
def cast_kernel(s, c, numel, BLOCK: tl.constexpr, MASK: tl.constexpr, TRUNCATE: tl.constexpr):
    """One fp32 tensor into its low-precision copy."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = owned(at, numel, BLOCK, MASK)
    x = tl.load(s + at, mask=here, other=0.0)
    if TRUNCATE:
        word = x.to(tl.int32, bitcast=True) & -65536
        x = word.to(tl.float32, bitcast=True)
    tl.store(c + at, x.to(c.dtype.element_ty), mask=here)


def cast_copy(
    call: CastCopyCall, mask: int = RIGHT, truncate: bool = False, block: int = 256
) -> None:
    """One launch for each tensor that has elements."""
    for s, c in zip(call.sources, call.copies, strict=True):
        if s.numel():
            cast_kernel[(-(-s.numel() // block),)](
                s, c, s.numel(), BLOCK=block, MASK=mask, TRUNCATE=truncate
            )
