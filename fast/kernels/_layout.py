"""Chunks of tensors, and the layout of the pointer tables that tensors are found through.

A program owns one chunk of CHUNK elements. Where addresses are aligned it walks whole tiles of
TILE elements without masks: four elements for each of 128 threads, the width at which 16-bit and
32-bit tensors share one thread layout (eight would send the 16-bit tensors through shared memory).
What is left, or all of a misaligned tensor, is walked in tiles of EDGE elements under a mask, one
element for each thread: wider tiles could not use wider accesses there, and would go through shared
memory too.

A pointer table is one int64 tensor, laid out for T tensors and C chunks as
DEPTH rows of T addresses, then the rows numel[T], aligned[T], slot[T], then C pairs
(tensor, chunk within the tensor). `aligned` is 1 when every address of the column is a multiple
of 16; `slot` is the tensor's place in the caller's list, empty tensors counted.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(512)
EDGE = tl.constexpr(128)
CHUNK = tl.constexpr(4096)


@triton.jit
def whole_tiles(count):
    """Return how many of the first `count` elements whole tiles cover, none if negative."""
    return tl.maximum(count, 0) // TILE * TILE


@triton.jit
def chunk_of(table, tensors, DEPTH: tl.constexpr):
    """Return (tensor, first element) of this program's chunk."""
    pair = table + (DEPTH + 3) * tensors + 2 * tl.program_id(0).to(tl.int64)
    # The product with CHUNK is what proves to the compiler that tiles start on 16 bytes.
    return tl.load(pair), tl.load(pair + 1) * CHUNK


@triton.jit
def address_of(table, tensors, tensor, ROW: tl.constexpr):
    """Return the address in row ROW of one tensor."""
    return tl.load(table + ROW * tensors + tensor)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address as a pointer to TYPE.

    ALIGNED promises 16 bytes to the compiler. The promise sticks to the cast made here, so it may
    be given only inside the branch that has tested the table's `aligned`.
    """
    found = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def facts_of(table, tensors, tensor, DEPTH: tl.constexpr):
    """Return (numel, aligned, slot) of one tensor."""
    row = table + DEPTH * tensors + tensor
    return tl.load(row), tl.load(row + tensors), tl.load(row + 2 * tensors)
