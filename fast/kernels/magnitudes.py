"""Norms of the kinds 1 and infinity, in one read of the gradients: exact like that of kind 2.

Versions, and what each costs: list, through a pointer table; 2 bytes per 16-bit gradient and 48
more per span of 16384. Sums of magnitudes go to the same limbs as squares do. The largest
magnitude goes to a slot of its own behind them, as bits, which order like magnitudes: infinity
and NaN come last.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fast.dispatch import TRITON_DTYPE, launch, resident_programs
from fast.kernels._layout import address_of, facts_of, pointer
from fast.kernels._limbs import (
    INFINITY,
    NONFINITE,
    PADDED,
    add_window,
    power_of_two,
    round_limbs,
)
from fast.kernels.reduce import REDUCE_CHUNK, SPAN, WARPS, store_limbs
from fast.tables import SHARED, TableCache, tensor_tables

LARGEST = tl.constexpr(25)  # the slot of the largest magnitude


@triton.jit
def add_magnitudes(limbs, x):
    """Add the magnitudes of one tile of at most 4096 elements, or count it as non-finite."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits)
    if largest >= INFINITY:
        infinite = tl.max((bits == INFINITY).to(tl.int64))
        nan = (largest > INFINITY).to(tl.int64) << 32
        limbs += tl.where(tl.arange(0, PADDED) == NONFINITE, infinite + nan, 0)
    else:
        rest = bits.to(tl.float32, bitcast=True).to(tl.float64)
        top = largest.to(tl.float32, bitcast=True).to(tl.float64)
        exponent = (top.to(tl.int64, bitcast=True) >> 52) - 1023
        # Biased to be positive: the division of integers truncates towards zero.
        k = (exponent + 1200) // 40 - 30
        left = largest
        while left != 0:
            c = 1.5 * power_of_two(52 + 40 * k)
            head = (rest + c) - c
            rest = rest - head
            total = (tl.sum(head) * power_of_two(-40 * k)).to(tl.int64)
            limbs = add_window(limbs, total, k)
            left = tl.max((rest != 0.0).to(tl.int32))
            k -= 1
    return limbs


@triton.jit
def note_tile(limbs, x, KIND: tl.constexpr):
    """Take one tile into account."""
    if KIND == "1":
        limbs = add_magnitudes(limbs, x)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        limbs = tl.maximum(limbs, tl.max(bits).to(tl.int64))
    return limbs


@triton.jit(do_not_specialize=["tensors", "chunks"])
def magnitudes_kernel(
    table, limbs, tensors: tl.int64, chunks: tl.int64, G: tl.constexpr, KIND: tl.constexpr
):
    """Every tensor of one dtype."""
    lanes = tl.arange(0, REDUCE_CHUNK)
    total = tl.zeros([PADDED], tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    while chunk < chunks:
        pair = table + 4 * tensors + 2 * chunk
        tensor = tl.load(pair)
        start = tl.load(pair + 1) * SPAN
        numel, aligned, _ = facts_of(table, tensors, tensor, 1)
        address = address_of(table, tensors, tensor, 0)
        stop = tl.minimum(start + SPAN, numel)
        while start < stop:
            if (aligned != 0) & (start + REDUCE_CHUNK <= numel):
                x = tl.load(pointer(address, G, True) + start + lanes)
                total = note_tile(total, x, KIND)
            else:
                at = start + lanes
                x = tl.load(pointer(address, G, False) + at, mask=at < numel, other=0.0)
                total = note_tile(total, x, KIND)
            start += REDUCE_CHUNK
        chunk += tl.num_programs(0)
    if KIND == "1":
        store_limbs(limbs, total)
    else:
        tl.atomic_max(limbs + LARGEST, tl.max(total), sem="relaxed")


@triton.jit
def sum_of(limbs):
    """Return the sum of magnitudes as fp32: any NaN gives NaN, otherwise any infinity gives inf."""
    nonfinite = tl.load(limbs + NONFINITE)
    total = round_limbs(limbs).to(tl.float32)
    total = tl.where(nonfinite != 0, float("inf"), total)
    return tl.where((nonfinite >> 32) != 0, float("nan"), total)


@triton.jit
def largest_of(limbs):
    """Return the largest magnitude as fp32; NaN beats infinity."""
    return tl.load(limbs + LARGEST).to(tl.int32).to(tl.float32, bitcast=True)


def reduce_magnitudes(
    grads: Sequence[Tensor], limbs: Tensor, kind: str, cache: TableCache = SHARED
) -> None:
    """Enter all gradients into the limbs: one launch for each dtype; kind is "1" or "inf"."""
    for table in tensor_tables([grads], chunk=SPAN.value, cache=cache):
        launch(
            magnitudes_kernel,
            resident_programs(limbs.device, table.chunks),
            limbs,
            (table.data, limbs, table.tensors, table.chunks),
            reaches=grads,
            warps=WARPS,
            G=TRITON_DTYPE[table.dtypes[0]],
            KIND=kind,
        )
