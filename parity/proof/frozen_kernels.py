# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Kernels of ours as they were when the corpus was made, where ours have changed since."""

import triton
import triton.language as tl

from twinstep.fast.kernels._arith import FOUND_INF as SKIP
from twinstep.fast.kernels._arith import (
    HEADER,
    adam_tile,
    load_adam_coefficients,
)
from twinstep.fast.kernels._lamb import trust_ratio
from twinstep.fast.kernels._layout import CHUNK, EDGE, TILE, whole_tiles
from twinstep.fast.kernels._limbs import PADDED


@triton.jit(do_not_specialize=["numel", "slot"], do_not_specialize_on_alignment=["coefficients"])
def adam_flat_kernel(
    param,
    grads,
    exp_avgs,
    exp_avg_sqs,
    copies,
    coefficients,
    numel: tl.int64,
    slot: tl.int64,
    DECOUPLED: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """One tensor.

    Named `param`: the function that Triton generates to launch a kernel overwrites `params`.
    """
    skip = tl.load(coefficients + SKIP)
    c = load_adam_coefficients(coefficients, slot)
    if skip != 0.0:
        return
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = whole_tiles(left)
    for tile in range(0, whole, TILE):
        at = start + tile + tl.arange(0, TILE)
        adam_tile(param, grads, exp_avgs, exp_avg_sqs, copies, at, None, c, DECOUPLED, HAS_COPY)
    for tile in range(whole, left, EDGE):
        at = start + tile + tl.arange(0, EDGE)
        tail = at < numel
        adam_tile(param, grads, exp_avgs, exp_avg_sqs, copies, at, tail, c, DECOUPLED, HAS_COPY)


@triton.jit(do_not_specialize_on_alignment=["coefficients", "ratios"])
def lamb_ratio_kernel(coefficients, limbs, ratios, KEEPS: tl.constexpr):
    """The length of one tensor's step: its step size times its trust ratio, which may be kept."""
    skip = tl.load(coefficients + SKIP)
    if skip != 0.0:
        return
    slot = tl.program_id(0).to(tl.int64)
    rho = trust_ratio(limbs + 2 * PADDED * slot, coefficients)
    pair = coefficients + HEADER + 2 * slot
    tl.store(pair + 1, tl.load(pair) * rho)
    if KEEPS:
        tl.store(ratios + slot, rho)
