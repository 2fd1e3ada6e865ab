"""The norm of all gradients and whether any is non-finite, in one read.

Versions, and what each costs:

1. flat: one tensor; 2 bytes per 16-bit gradient.
2. list: tensors of one dtype through a pointer table; 48 bytes more per span of 16384.

Kinds 1 and infinity read the same: sums of magnitudes go to the same limbs as squares do, and the
largest magnitude is the largest of bit patterns, among which infinity and NaN come last.

Programs are persistent: each walks over every n-th chunk with its limbs in registers and adds
them to memory once. A second launch of one program rounds the limbs (`norm_kernel`; a whole mixed
step does that in its finalise kernel instead).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinstep.contract.tensors import FLOATS
from twinstep.fast.kernels._layout import address_of, facts_of, pointer
from twinstep.fast.kernels._limbs import LARGEST, NONFINITE, PADDED, add_tile, norm_of
from twinstep.fast.runtime.checks import require_controls, require_lists
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, cdiv, launch, resident_programs
from twinstep.fast.runtime.tables import SHARED, TableCache, only_slot, tensor_tables

REDUCE_CHUNK = tl.constexpr(4096)  # elements whose squares are added at once
SPAN = tl.constexpr(16384)  # elements for each entry of the pointer table
WARPS = 8


@triton.jit
def note_tile(total, x, KIND: tl.constexpr):
    """Take a tile of at most 4096 elements into a program's limbs, or its largest magnitude."""
    if KIND == "inf":
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        total = tl.maximum(total, tl.max(bits).to(tl.int64))
    else:
        total = add_tile(total, x, KIND == "2")
    return total


@triton.jit
def store_limbs(limbs, total):
    """Add a program's limbs to those in memory."""
    lane = tl.arange(0, PADDED)
    used = (lane <= NONFINITE) & (total != 0)
    tl.atomic_add(limbs + lane, total, mask=used, sem="relaxed")


@triton.jit
def store_total(limbs, total, KIND: tl.constexpr):
    """Put what a program has found into memory."""
    if KIND == "inf":
        tl.atomic_max(limbs + LARGEST, tl.max(total), sem="relaxed")
    else:
        store_limbs(limbs, total)


@triton.jit(do_not_specialize=["numel"])
def reduce_flat_kernel(grads, limbs, numel: tl.int64, KIND: tl.constexpr):
    """One tensor."""
    lanes = tl.arange(0, REDUCE_CHUNK)
    total = tl.zeros([PADDED], tl.int64)
    start = tl.program_id(0).to(tl.int64) * REDUCE_CHUNK
    while start < numel:
        # One tile behind both branches: a second copy of it costs registers, and then spills.
        if start + REDUCE_CHUNK <= numel:
            x = tl.load(grads + start + lanes)
        else:
            at = start + lanes
            x = tl.load(grads + at, mask=at < numel, other=0.0)
        total = note_tile(total, x, KIND)
        start += tl.num_programs(0).to(tl.int64) * REDUCE_CHUNK
    store_total(limbs, total, KIND)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def reduce_list_kernel(
    table, limbs, tensors: tl.int64, chunks: tl.int64, G: tl.constexpr, KIND: tl.constexpr
):
    """Every tensor of one dtype."""
    lanes = tl.arange(0, REDUCE_CHUNK)
    total = tl.zeros([PADDED], tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    while chunk < chunks:
        pair = table + 4 * tensors + 2 * chunk
        tensor = tl.load(pair)
        first = tl.load(pair + 1) * SPAN
        numel, aligned, _ = facts_of(table, tensors, tensor, 1)
        address = address_of(table, tensors, tensor, 0)
        # Within a span 32 bits do: 64 for each element cost registers, and then spill.
        left = tl.minimum(numel - first, SPAN).to(tl.int32)
        whole = tl.where(aligned != 0, left - left % REDUCE_CHUNK, 0)
        for start in range(0, left, REDUCE_CHUNK):
            at = start + lanes
            if start < whole:
                x = tl.load(pointer(address, G, True) + first + at)
            else:
                x = tl.load(pointer(address, G, False) + first + at, mask=at < left, other=0.0)
            total = note_tile(total, x, KIND)
        chunk += tl.num_programs(0)
    store_total(limbs, total, KIND)


@triton.jit(do_not_specialize_on_alignment=["norm", "found_inf"])
def norm_kernel(limbs, norm, found_inf):
    """Round the limbs to the norm, and set found_inf where they say so."""
    value, nonfinite = norm_of(limbs)
    tl.store(norm, value)
    if nonfinite != 0.0:
        tl.store(found_inf, nonfinite)


def new_limbs(device: torch.device) -> Tensor:
    """Return the limbs of an empty sum."""
    return torch.zeros(PADDED.value, dtype=torch.int64, device=device)


def reduce_gradients(
    grads: Sequence[Tensor], limbs: Tensor, cache: TableCache = SHARED, *, kind: str = "2"
) -> None:
    """Enter all gradients into the limbs: one launch for each dtype.

    Args:
        grads: of any dtypes, not empty where `limbs` is to change.
        limbs: int64[PADDED]; sums are added to it, of squares for `kind` "2", of magnitudes for
            "1"; for "inf" its slot LARGEST rises to the largest magnitude.
        cache: of pointer tables.
        kind: of the norm that they are for.
    """
    slot = only_slot([grads])
    if slot is not None:
        launch(
            reduce_flat_kernel,
            resident_programs(limbs.device, cdiv(grads[slot].numel(), REDUCE_CHUNK.value)),
            limbs,
            (grads[slot], limbs, grads[slot].numel()),
            warps=WARPS,
            KIND=kind,
        )
        return
    for table in tensor_tables([grads], chunk=SPAN.value, cache=cache):
        launch(
            reduce_list_kernel,
            resident_programs(limbs.device, table.chunks),
            limbs,
            (table.data, limbs, table.tensors, table.chunks),
            reaches=[grads],
            G=TRITON_DTYPE[table.dtypes[0]],
            KIND=kind,
            warps=WARPS,
        )


def global_norm_(grads: Sequence[Tensor], *, norm: Tensor, found_inf: Tensor) -> None:
    """Write norm = fp32(sqrt(S)), S the exact sum of squares, and whether any is not finite.

    Args:
        grads: fp32, fp16 or bf16, contiguous; read once.
        norm: fp32, shape (); written. Any NaN gives NaN, otherwise any infinity gives +inf;
            no elements give 0.0.
        found_inf: fp32, shape (); set to 1.0, never cleared.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: devices differ, or a tensor is not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    require_lists("global_norm_", {"grads": grads}, {"grads": FLOATS}, norm)
    require_controls("global_norm_", norm, {"norm": norm, "found_inf": found_inf})
    limbs = new_limbs(norm.device)
    reduce_gradients(grads, limbs)
    launch(norm_kernel, 1, norm, (limbs, norm, found_inf), warps=1)
