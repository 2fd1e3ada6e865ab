"""Gradient accumulation: a = fp32(a) + fp32(g), rounded once to the accumulator's dtype.

Versions, and what each costs for fp32 accumulators and 16-bit gradients:

1. flat: one pair of tensors; reads 4 + 2, writes 4 bytes per element: 10.
2. list: pairs of one dtype combination through a pointer table, 48 bytes more per chunk of 4096.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._layout import (
    CHUNK,
    EDGE,
    TILE,
    address_of,
    chunk_of,
    facts_of,
    pointer,
    whole_tiles,
)
from twinstep.fast.runtime.checks import require_pairs
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, cdiv, launch
from twinstep.fast.runtime.tables import SHARED, TableCache, only_slot, tensor_tables


@triton.jit
def accumulate_tile(accumulators, grads, at, mask):
    """Accumulate one tile."""
    a = tl.load(accumulators + at, mask=mask).to(tl.float32)
    g = tl.load(grads + at, mask=mask)
    if (g.dtype == tl.bfloat16) & (accumulators.dtype.element_ty == tl.float16):
        # LLVM takes a sum of both that is rounded to fp16 for one of fp16 numbers: it would round
        # the gradient first, to infinity from 65520 on.
        g = (g.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        g = g.to(tl.float32)
    tl.store(accumulators + at, (a + g).to(accumulators.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numel"])
def accumulate_flat_kernel(accumulators, grads, numel: tl.int64):
    """One pair of tensors."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = whole_tiles(left)
    for tile in range(0, whole, TILE):
        accumulate_tile(accumulators, grads, start + tile + tl.arange(0, TILE), None)
    for tile in range(whole, left, EDGE):
        at = start + tile + tl.arange(0, EDGE)
        accumulate_tile(accumulators, grads, at, at < numel)


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table"])
def accumulate_list_kernel(table, tensors: tl.int64, A: tl.constexpr, G: tl.constexpr):
    """Every pair of one dtype combination."""
    tensor, start = chunk_of(table, tensors, 2)
    numel, aligned, _ = facts_of(table, tensors, tensor, 2)
    a = address_of(table, tensors, tensor, 0)
    g = address_of(table, tensors, tensor, 1)
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = tl.where(aligned != 0, whole_tiles(left), 0)
    if whole > 0:
        accumulators = pointer(a, A, True)
        grads = pointer(g, G, True)
        for tile in range(0, whole, TILE):
            accumulate_tile(accumulators, grads, start + tile + tl.arange(0, TILE), None)
    if whole < left:
        accumulators = pointer(a, A, False)
        grads = pointer(g, G, False)
        for tile in range(whole, left, EDGE):
            at = start + tile + tl.arange(0, EDGE)
            accumulate_tile(accumulators, grads, at, at < numel)


def accumulate_(accumulators: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add every gradient to its accumulator.

    Args:
        accumulators: fp32, fp16 or bf16, contiguous; written.
        grads: of the same shapes, fp32, fp16 or bf16, contiguous.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    require_pairs("accumulate_", {"accumulators": accumulators, "grads": grads})
    accumulate_lists(accumulators, grads, SHARED)


def accumulate_lists(
    accumulators: Sequence[Tensor], grads: Sequence[Tensor], cache: TableCache
) -> None:
    """Do so with lists that are known to fit; a gradient may have any shape of as many elements."""
    slot = only_slot([accumulators, grads])
    if slot is not None:
        accumulator, grad = accumulators[slot], grads[slot]
        numel = grad.numel()
        args = (accumulator, grad, numel)
        launch(accumulate_flat_kernel, cdiv(numel, CHUNK.value), accumulator, args)
        return
    for table in tensor_tables([accumulators, grads], chunk=CHUNK.value, cache=cache):
        launch(
            accumulate_list_kernel,
            table.chunks,
            table.data,
            (table.data, table.tensors),
            reaches=[accumulators, grads],
            A=TRITON_DTYPE[table.dtypes[0]],
            G=TRITON_DTYPE[table.dtypes[1]],
        )
