"""Small Triton kernels that reach memory they should not; switches mend them."""

import torch
import triton
import triton.language as tl

from twinstep.parity.proof.corpus.calls import CastCopyCall, GlobalNormCall

BLOCK = 512
PARTS = 128


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["g", "parts"])
def squares_kernel(g, parts, numel, BLOCK: tl.constexpr):
    """The sum of squares of each block, float64."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(g + at, mask=at < numel, other=0.0).to(tl.float64)
    tl.store(parts + tl.program_id(0), tl.sum(x * x, axis=0))


@triton.jit(do_not_specialize=["count"])
def root_kernel(parts, norm, found_inf, count, PARTS: tl.constexpr, DROPS: tl.constexpr):
    """The root of all sums; with DROPS what lies behind them is read and not used."""
    at = tl.arange(0, PARTS)
    part = tl.load(parts + at)
    if DROPS:
        part = tl.where(at < count, part, 0.0)
    root = tl.sqrt(tl.sum(part, axis=0))
    tl.store(norm, root.to(tl.float32))
    tl.store(found_inf, 1.0, mask=(root - root) != 0.0)


def global_norm(call: GlobalNormCall, zeroed: bool, drops: bool = False) -> None:
    """Sums of blocks in scratch memory of a fixed length, then one program for the root."""
    made = torch.zeros if zeroed else torch.empty
    count = sum(-(-g.numel() // BLOCK) for g in call.grads)
    length = max(PARTS, triton.next_power_of_2(count))
    parts = made(length, dtype=torch.float64, device=call.norm.device)
    start = 0
    for g in call.grads:
        blocks = -(-g.numel() // BLOCK)
        if blocks:
            squares_kernel[(blocks,)](g, parts[start:], g.numel(), BLOCK=BLOCK)
        start += blocks
    root_kernel[(1,)](parts, call.norm, call.found_inf, count, PARTS=length, DROPS=drops)


@triton.jit(
    do_not_specialize=["numel", "distance"], do_not_specialize_on_alignment=["x", "out", "distance"]
)
def cast_kernel(x, out, numel, distance, BLOCK: tl.constexpr, KEEPS: tl.constexpr):
    """A cast; with KEEPS a NaN that the copy held before stays.

    Unless it is 0, `distance` is that of another tensor, whose first element is cleared.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    new = tl.load(x + at, mask=here, other=0.0).to(out.dtype.element_ty)
    if KEEPS:
        old = tl.load(out + at, mask=here, other=0.0)
        new = tl.where(old != old, old, new)
    tl.store(out + at, new, mask=here)
    if distance != 0:
        tl.store(out + distance, 0.0)


def cast_copy(call: CastCopyCall, *, keeps: bool = False, clears: bool = False) -> None:
    """One launch for each tensor that has elements; it may clear the start of the next one."""
    held = [i for i, source in enumerate(call.sources) if source.numel()]
    for i, following in zip(held, [*held[1:], None], strict=True):
        source, copy = call.sources[i], call.copies[i]
        distance = 0
        if clears and following is not None:
            bytes_ = call.copies[following].data_ptr() - copy.data_ptr()
            distance = bytes_ // copy.element_size()
        blocks = -(-source.numel() // BLOCK)
        cast_kernel[(blocks,)](source, copy, source.numel(), distance, BLOCK=BLOCK, KEEPS=keeps)
