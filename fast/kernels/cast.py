"""Copies in another precision: c = fp32(s), rounded once to nearest even.

Versions, and what each costs from fp32 to 16 bits:

1. flat: one pair of tensors; reads 4, writes 2 bytes per element: 6.
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
from twinstep.fast.runtime.tables import only_slot, tensor_tables


@triton.jit
def cast_tile(sources, copies, at, mask):
    """Cast one tile through fp32, which holds every source exactly."""
    s = tl.load(sources + at, mask=mask).to(tl.float32)
    tl.store(copies + at, s.to(copies.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numel"])
def cast_flat_kernel(sources, copies, numel: tl.int64):
    """One pair of tensors."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = whole_tiles(left)
    for tile in range(0, whole, TILE):
        cast_tile(sources, copies, start + tile + tl.arange(0, TILE), None)
    for tile in range(whole, left, EDGE):
        at = start + tile + tl.arange(0, EDGE)
        cast_tile(sources, copies, at, at < numel)


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["table"])
def cast_list_kernel(table, tensors: tl.int64, S: tl.constexpr, C: tl.constexpr):
    """Every pair of one dtype combination."""
    tensor, start = chunk_of(table, tensors, 2)
    numel, aligned, _ = facts_of(table, tensors, tensor, 2)
    s = address_of(table, tensors, tensor, 0)
    c = address_of(table, tensors, tensor, 1)
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = tl.where(aligned != 0, whole_tiles(left), 0)
    # Offsets count from the chunk, in 32 bits: 64 bits for each element cost registers, and spill.
    if whole > 0:
        sources = pointer(s, S, True) + start
        copies = pointer(c, C, True) + start
        for tile in range(0, whole, TILE):
            cast_tile(sources, copies, tile + tl.arange(0, TILE), None)
    if whole < left:
        sources = pointer(s, S, False) + start
        copies = pointer(c, C, False) + start
        for tile in range(whole, left, EDGE):
            at = tile + tl.arange(0, EDGE)
            cast_tile(sources, copies, at, at < left)


def cast_copy_(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Write every source into its copy.

    Args:
        sources: fp32, fp16 or bf16, contiguous.
        copies: of the same shapes, fp32, fp16 or bf16, contiguous; written.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: lengths, shapes or devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    require_pairs("cast_copy_", {"sources": sources, "copies": copies})
    slot = only_slot([sources, copies])
    if slot is not None:
        source, copy = sources[slot], copies[slot]
        args = (source, copy, source.numel())
        launch(cast_flat_kernel, cdiv(source.numel(), CHUNK.value), source, args)
        return
    for table in tensor_tables([sources, copies], chunk=CHUNK.value):
        launch(
            cast_list_kernel,
            table.chunks,
            table.data,
            (table.data, table.tensors),
            reaches=[sources, copies],
            S=TRITON_DTYPE[table.dtypes[0]],
            C=TRITON_DTYPE[table.dtypes[1]],
        )
