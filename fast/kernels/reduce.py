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
from twinstep.fast.kernels._limbs import INFINITY, LARGEST, NONFINITE, PADDED, add_tile, norm_of
from twinstep.fast.kernels._squares import (
    SUMS,
    WIDTH,
    add_squares,
    constants_of,
    into_limbs,
    misfits,
    no_squares,
    room,
    window_above,
)
from twinstep.fast.runtime.checks import require_controls, require_lists
from twinstep.fast.runtime.dispatch import TRITON_DTYPE, cdiv, launch, resident_programs
from twinstep.fast.runtime.tables import SHARED, TableCache, only_slot, tensor_tables

REDUCE_CHUNK = tl.constexpr(4096)  # elements whose squares are added at once
SPAN = tl.constexpr(16384)  # elements for each entry of the pointer table
PART = tl.constexpr(4096)  # bytes of one load: 16 for each thread
TURN = tl.constexpr(4 * PART)  # bytes that a turn of the main loop reads
NO_WINDOW = tl.constexpr(1 << 20)
WARPS = 8
RESIDENT = 2  # programs of a multiprocessor: 256 threads of at most 128 registers each


@triton.jit
def note_tile(total, x, KIND: tl.constexpr):
    """Take a tile of at most 4096 elements into a program's limbs, or its largest magnitude."""
    if KIND == "inf":
        total = tl.maximum(total, tl.max(magnitude_bits(x)).to(tl.int64))
    else:
        total = add_tile(total, x, KIND == "2")
    return total


@triton.constexpr_function
def significant_bits(dtype: tl.dtype) -> int:
    """Return how many bits a number's significand has."""
    return {"fp32": 24, "fp16": 11, "bf16": 8}[dtype.name]


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as fp32: they order like |x|, and infinity and NaN come last."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_part(address, TYPE: tl.constexpr):
    """Return the PART bytes at an address on 16 bytes: bf16 as words of two, or numbers."""
    if significant_bits(TYPE) == 8:
        # What Triton makes of halves takes one instruction more for two elements.
        part = tl.load(pointer(address, tl.uint32, True) + tl.arange(0, WIDTH))
    elif significant_bits(TYPE) == 11:
        part = tl.load(pointer(address, TYPE, True) + tl.arange(0, 2 * WIDTH))
    else:
        part = tl.load(pointer(address, TYPE, True) + tl.arange(0, WIDTH))
    return part


@triton.jit
def half_of(part, HALF: tl.constexpr, TYPE: tl.constexpr):
    """Return every other number of what `load_part` has returned, as fp32."""
    if significant_bits(TYPE) == 8:
        word = (part & 0xFFFF0000) if HALF == 1 else (part << 16)
        x = word.to(tl.float32, bitcast=True)
    else:
        both = tl.split(tl.reshape(part, [part.numel // 2, 2]))
        x = both[HALF].to(tl.float32)
    return x


@triton.jit
def note_span(total, address, first, left, aligned, TYPE: tl.constexpr, KIND: tl.constexpr):
    """Take a span tile by tile into a program's limbs; also return its largest magnitude."""
    # Squares come here by exception: a small tile, so that their main path has the registers.
    TILE: tl.constexpr = WIDTH if KIND == "2" else REDUCE_CHUNK
    largest = 0
    whole = tl.where(aligned, left - left % TILE, 0)
    for start in range(0, left, TILE):
        at = start + tl.arange(0, TILE)
        # One tile behind both branches: a second copy of it costs registers, and then spills.
        if start < whole:
            x = tl.load(pointer(address, TYPE, True) + first + at)
        else:
            x = tl.load(pointer(address, TYPE, False) + first + at, mask=at < left, other=0.0)
        total = note_tile(total, x, KIND)
        if KIND == "2":
            largest = tl.maximum(largest, tl.max(magnitude_bits(x)))
    return total, largest


@triton.jit
def square_span(sums, address, first, left, aligned, exponent, TYPE: tl.constexpr):
    """Add a span's squares to every lane's sums; also return what shows that some do not fit."""
    s0, s1, s2 = sums
    BITS: tl.constexpr = significant_bits(TYPE)
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    c = constants_of(exponent, BITS)
    above = tl.zeros([SUMS], tl.int32)
    below = tl.zeros([SUMS], tl.int32)
    STEP: tl.constexpr = TURN // SIZE
    whole = tl.where(aligned, left - left % STEP, 0)
    for start in range(0, whole, STEP):
        here = address + (first + start) * SIZE
        parts = (
            load_part(here, TYPE),
            load_part(here + PART, TYPE),
            load_part(here + 2 * PART, TYPE),
            load_part(here + 3 * PART, TYPE),
        )
        # Half of every part first, or ptxas would load a part when the one before it is done with.
        for half in tl.static_range(2):
            for part in tl.static_range(4):
                x = half_of(parts[part], half, TYPE)
                s0, s1, s2, above, below = add_squares(s0, s1, s2, above, below, x, c, BITS)
    for start in range(whole, left, WIDTH):
        at = start + tl.arange(0, WIDTH)
        if aligned & (start + WIDTH <= left):
            x = tl.load(pointer(address, TYPE, True) + first + at)
        else:
            x = tl.load(pointer(address, TYPE, False) + first + at, mask=at < left, other=0.0)
        x = x.to(tl.float32)
        s0, s1, s2, above, below = add_squares(s0, s1, s2, above, below, x, c, BITS)
    return (s0, s1, s2), above, below


@triton.jit
def take_span(state, address, first, left, aligned, TYPE: tl.constexpr, KIND: tl.constexpr):
    """Take a span into a program's state: limbs, and for squares what is not yet in them."""
    total, sums, additions, exponent = state
    if KIND == "2":
        BITS: tl.constexpr = significant_bits(TYPE)
        if exponent == NO_WINDOW:
            # The first numbers show the window. They are summed here, or would be read twice.
            some = tl.minimum(left, WIDTH)
            total, largest = note_span(total, address, first, some, aligned, TYPE, KIND)
            exponent = window_above(largest, BITS)
            first += some
            left -= some
        before = sums
        sums, above, below = square_span(sums, address, first, left, aligned, exponent, TYPE)
        again = misfits(above, below, BITS)
        if again:
            sums = before
        else:
            additions += (left + WIDTH - 1) // WIDTH * 2
        if again | (additions > room(BITS) - SPAN // SUMS):
            total = into_limbs(total, sums, additions, exponent, BITS)
            sums = no_squares()
            additions = 0
        if again:
            total, largest = note_span(total, address, first, left, aligned, TYPE, KIND)
            if largest < INFINITY:
                exponent = window_above(largest, BITS)
    else:
        total, _ = note_span(total, address, first, left, aligned, TYPE, KIND)
    return total, sums, additions, exponent


@triton.jit
def store_limbs(limbs, total):
    """Add a program's limbs to those in memory."""
    lane = tl.arange(0, PADDED)
    used = (lane <= NONFINITE) & (total != 0)
    tl.atomic_add(limbs + lane, total, mask=used, sem="relaxed")


@triton.jit
def no_sums():
    """Return the state of a program that has seen nothing."""
    return tl.zeros([PADDED], tl.int64), no_squares(), 0, NO_WINDOW


@triton.jit
def store_total(limbs, state, TYPE: tl.constexpr, KIND: tl.constexpr):
    """Put what a program has found into memory."""
    total, sums, additions, exponent = state
    if KIND == "2":
        total = into_limbs(total, sums, additions, exponent, significant_bits(TYPE))
    if KIND == "inf":
        tl.atomic_max(limbs + LARGEST, tl.max(total), sem="relaxed")
    else:
        store_limbs(limbs, total)


@triton.jit(do_not_specialize=["numel"])
def reduce_flat_kernel(grads, limbs, numel: tl.int64, KIND: tl.constexpr):
    """One tensor."""
    TYPE: tl.constexpr = grads.dtype.element_ty
    address = grads.to(tl.int64)
    state = no_sums()
    start = tl.program_id(0).to(tl.int64) * SPAN
    while start < numel:
        left = tl.minimum(numel - start, SPAN).to(tl.int32)
        state = take_span(state, address, start, left, address % 16 == 0, TYPE, KIND)
        start += tl.num_programs(0).to(tl.int64) * SPAN
    store_total(limbs, state, TYPE, KIND)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def reduce_list_kernel(
    table, limbs, tensors: tl.int64, chunks: tl.int64, G: tl.constexpr, KIND: tl.constexpr
):
    """Every tensor of one dtype."""
    state = no_sums()
    chunk = tl.program_id(0).to(tl.int64)
    while chunk < chunks:
        pair = table + 4 * tensors + 2 * chunk
        tensor = tl.load(pair)
        first = tl.load(pair + 1) * SPAN
        numel, aligned, _ = facts_of(table, tensors, tensor, 1)
        address = address_of(table, tensors, tensor, 0)
        # Within a span 32 bits do: 64 for each element cost registers, and then spill.
        left = tl.minimum(numel - first, SPAN).to(tl.int32)
        state = take_span(state, address, first, left, aligned != 0, G, KIND)
        chunk += tl.num_programs(0)
    store_total(limbs, state, G, KIND)


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
            resident_programs(limbs.device, cdiv(grads[slot].numel(), SPAN.value), RESIDENT),
            limbs,
            (grads[slot], limbs, grads[slot].numel()),
            warps=WARPS,
            KIND=kind,
        )
        return
    for table in tensor_tables([grads], chunk=SPAN.value, cache=cache):
        launch(
            reduce_list_kernel,
            resident_programs(limbs.device, table.chunks, RESIDENT),
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
