"""Overflow: unscale gradients in place and notice those that were not finite.

    found_inf = 1 if any stored gradient is inf or NaN, otherwise unchanged
    g = fp32(g) * inv_scale, rounded once

Versions, and what each costs:

1. flat: one tensor; reads and writes every gradient, 4 bytes per 16-bit gradient.
2. list: tensors of one dtype through a pointer table, 40 bytes more per chunk of 4096.

A whole mixed step needs neither: its update multiplies as it reads.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.contract.tensors import FLOATS
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
from twinstep.fast.runtime.checks import require_controls, require_lists
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, cdiv, launch
from twinstep.fast.runtime.tables import SHARED, TableCache, only_slot, tensor_tables


@triton.jit
def unscale_tile(grads, at, mask, factor):
    """Unscale one tile; return 1 for every element that was non-finite before, else 0."""
    if mask is None:
        g = tl.load(grads + at).to(tl.float32)
    else:
        g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(grads + at, (g * factor).to(grads.dtype.element_ty), mask=mask)
    # By bits: infinity and NaN are the patterns whose exponent is all ones.
    return ((g.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000).to(tl.int32)


@triton.jit
def raise_flag(found_inf, bad, bad_edge):
    """Set found_inf to 1.0 if any lane is set."""
    if (tl.max(bad) | tl.max(bad_edge)) != 0:
        # Atomic because several programs may say so at once; 0x3F800000 is 1.0 in fp32.
        word = found_inf.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_xchg(word, 0x3F800000, sem="relaxed")


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["inv_scale", "found_inf"])
def unscale_flat_kernel(grads, inv_scale, found_inf, numel: tl.int64):
    """One tensor."""
    factor = tl.load(inv_scale)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = whole_tiles(left)
    bad = tl.zeros([TILE], tl.int32)
    bad_edge = tl.zeros([EDGE], tl.int32)
    for tile in range(0, whole, TILE):
        bad |= unscale_tile(grads, start + tile + tl.arange(0, TILE), None, factor)
    for tile in range(whole, left, EDGE):
        at = start + tile + tl.arange(0, EDGE)
        bad_edge |= unscale_tile(grads, at, at < numel, factor)
    raise_flag(found_inf, bad, bad_edge)


@triton.jit(
    do_not_specialize=["tensors"],
    do_not_specialize_on_alignment=["table", "inv_scale", "found_inf"],
)
def unscale_list_kernel(table, inv_scale, found_inf, tensors: tl.int64, G: tl.constexpr):
    """Every tensor of one dtype."""
    factor = tl.load(inv_scale)
    tensor, start = chunk_of(table, tensors, 1)
    numel, aligned, _ = facts_of(table, tensors, tensor, 1)
    address = address_of(table, tensors, tensor, 0)
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    whole = tl.where(aligned != 0, whole_tiles(left), 0)
    bad = tl.zeros([TILE], tl.int32)
    bad_edge = tl.zeros([EDGE], tl.int32)
    if whole > 0:
        grads = pointer(address, G, True)
        for tile in range(0, whole, TILE):
            bad |= unscale_tile(grads, start + tile + tl.arange(0, TILE), None, factor)
    if whole < left:
        grads = pointer(address, G, False)
        for tile in range(whole, left, EDGE):
            at = start + tile + tl.arange(0, EDGE)
            bad_edge |= unscale_tile(grads, at, at < numel, factor)
    raise_flag(found_inf, bad, bad_edge)


def unscale_gradients(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, cache: TableCache = SHARED
) -> None:
    """Unscale gradients in place: one launch for each dtype. Arguments as in `unscale_`."""
    slot = only_slot([grads])
    if slot is not None:
        numel = grads[slot].numel()
        args = (grads[slot], inv_scale, found_inf, numel)
        launch(unscale_flat_kernel, cdiv(numel, CHUNK.value), inv_scale, args)
        return
    for table in tensor_tables([grads], chunk=CHUNK.value, cache=cache):
        launch(
            unscale_list_kernel,
            table.chunks,
            inv_scale,
            (table.data, inv_scale, found_inf, table.tensors),
            reaches=[grads],
            G=TRITON_DTYPE[table.dtypes[0]],
        )


def unscale_(grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Unscale gradients in place.

    Args:
        grads: fp32, fp16 or bf16, contiguous; written, also where they are not finite.
        inv_scale: 1 / loss scale, fp32, shape ().
        found_inf: fp32, shape (); set to 1.0, never cleared. The bits decide, before the
            multiplication.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    require_lists("unscale_", {"grads": grads}, {"grads": FLOATS}, inv_scale)
    require_controls("unscale_", inv_scale, {"inv_scale": inv_scale, "found_inf": found_inf})
    unscale_gradients(grads, inv_scale, found_inf)
