"""Tensors and one flat buffer: order, aligned slots, padding.

Tensor i starts at the next multiple of `slot` elements after the end of tensor i - 1. Slots of 16
elements keep every tensor on the 16-byte addresses that kernels like best.

Versions, and what each costs for 16-bit tensors:

1. one kernel for both directions: regions of memory copied through a pointer table, 4 bytes per
   element and 56 per chunk of 4096. A region that packs ends where the next one begins: what its
   tensor does not fill is written as +0, in the same pass.
"""

from collections.abc import Sequence

import torch
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
from twinstep.fast.runtime.checks import require_tensor
from twinstep.fast.runtime.dispatch import launch
from twinstep.fast.runtime.tables import SHARED, TensorTable, build_table

# Bits are copied as integers: a NaN keeps its payload.
WORD = {2: tl.int16, 4: tl.int32}


@triton.jit(do_not_specialize=["regions"], do_not_specialize_on_alignment=["table"])
def copy_kernel(table, regions: tl.int64, W: tl.constexpr):
    """Every region: `numel` words copied, then zeros up to the region's extent."""
    region, start = chunk_of(table, regions, 2)
    numel, aligned, extent = facts_of(table, regions, region, 2)
    source = address_of(table, regions, region, 0)
    target = address_of(table, regions, region, 1)
    left = tl.minimum(extent - start, CHUNK).to(tl.int32)
    filled = tl.maximum(tl.minimum(numel - start, CHUNK), 0).to(tl.int32)
    whole = tl.where(aligned != 0, whole_tiles(filled), 0)
    if whole > 0:
        sources = pointer(source, W, True)
        targets = pointer(target, W, True)
        for tile in range(0, whole, TILE):
            at = start + tile + tl.arange(0, TILE)
            tl.store(targets + at, tl.load(sources + at))
    if whole < left:
        sources = pointer(source, W, False)
        targets = pointer(target, W, False)
        for tile in range(whole, left, EDGE):
            at = start + tile + tl.arange(0, EDGE)
            words = tl.load(sources + at, mask=at < numel, other=0)
            tl.store(targets + at, words, mask=at < extent)


def offsets_of(tensors: Sequence[Tensor], slot: int) -> tuple[list[int], int]:
    """Return where each tensor starts, and where the last one ends, in elements."""
    starts = []
    end = 0
    for tensor in tensors:
        start = -(-end // slot) * slot
        starts.append(start)
        end = start + tensor.numel()
    return starts, end


def region_table(
    flat: Tensor, tensors: Sequence[Tensor], starts: Sequence[int], *, packs: bool
) -> TensorTable:
    """Return the table of (source, target) regions, one for each tensor that is not empty."""
    width = flat.element_size()
    filled = [(t, at) for t, at in zip(tensors, starts, strict=True) if t.numel()]
    slots = [flat.data_ptr() + at * width for _, at in filled]
    outside = [tensor.data_ptr() for tensor, _ in filled]
    sizes = [tensor.numel() for tensor, _ in filled]
    extents = sizes
    if packs:
        if not filled and flat.numel():
            # Nothing to copy, all to clear: one region that reads nothing.
            slots, outside, sizes = [flat.data_ptr()], [flat.data_ptr()], [0]
        ends = [*(at for _, at in filled[1:]), flat.numel()]
        extents = [end - at for end, at in zip(ends, [at for _, at in filled] or [0], strict=True)]
    rows = (outside, slots) if packs else (slots, outside)
    key = ("regions", flat.device, width, *map(tuple, (*rows, sizes, extents)))

    def build() -> list[TensorTable]:
        covered = torch.tensor(extents, dtype=torch.int64)
        return [
            build_table(
                torch.tensor(rows, dtype=torch.int64),
                torch.tensor(sizes, dtype=torch.int64),
                covered,
                chunked=covered,
                chunk=CHUNK.value,
                dtypes=(flat.dtype, flat.dtype),
                device=flat.device,
            )
        ]

    return SHARED.find(key, flat.device, build)[0]


def _copy(flat: Tensor, tensors: Sequence[Tensor], slot: int, *, packs: bool) -> None:
    starts, _ = offsets_of(tensors, slot)
    table = region_table(flat, tensors, starts, packs=packs)
    launch(
        copy_kernel,
        table.chunks,
        flat,
        (table.data, table.tensors),
        reaches=[[flat], tensors],
        W=WORD[flat.element_size()],
    )


def require_room(where: str, flat: Sequence[Tensor], tensors: Sequence[Tensor], slot: int) -> None:
    """Require one flat buffer that holds all tensors, and one dtype on both sides."""
    if len(flat) != 1:
        raise ValueError(f"flat has {len(flat)} tensors, but should have 1 [{where}]")
    if slot < 1:
        raise ValueError(f"slot={slot}, but should be at least 1 element [{where}]")
    buffer = flat[0]
    require_tensor(where, "flat[0]", buffer, FLOATS, buffer)
    for index, tensor in enumerate(tensors):
        require_tensor(where, f"tensors[{index}]", tensor, (buffer.dtype,), buffer)
    _, end = offsets_of(tensors, slot)
    if buffer.numel() < end:
        raise ValueError(
            f"flat[0] has {buffer.numel()} elements, but should have at least {end} for "
            f"{len(tensors)} tensors in slots of {slot} [{where}]"
        )


def flatten_(tensors: Sequence[Tensor], flat: Sequence[Tensor], *, slot: int) -> None:
    """Copy tensors into the flat buffer; every element that belongs to none becomes +0.

    Args:
        tensors: of one dtype (fp32, fp16 or bf16), contiguous.
        flat: a list of one contiguous buffer of that dtype; written in full.
        slot: elements that tensors start on a multiple of.

    Raises:
        TypeError: dtypes differ.
        ValueError: the buffer is too small, devices differ, or a tensor is not contiguous.
    """
    require_room("flatten_", flat, tensors, slot)
    _copy(flat[0], tensors, slot, packs=True)


def unflatten_(flat: Sequence[Tensor], tensors: Sequence[Tensor], *, slot: int) -> None:
    """Copy the flat buffer back into tensors; arguments and errors as in `flatten_`."""
    require_room("unflatten_", flat, tensors, slot)
    _copy(flat[0], tensors, slot, packs=False)
