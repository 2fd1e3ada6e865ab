"""Triton kernels that reach their elements in the ways that users launch them, all of them right.

One launch for a whole list by a table of addresses, a grid folded into a plane, a loop over the
grid, an autotuner, controls that only the device reads, and partial sums in scratch memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from twinstep.parity.proof.corpus.calls import (
    AccumulateCall,
    CastCopyCall,
    GlobalNormCall,
    SgdCall,
)

PLANE = 65_535


def blocks_of(numel: int, block: int) -> int:
    """Number of blocks that cover a tensor."""
    return -(-numel // block)


@triton.jit
def added(a, g, at, here):
    """A store of a + g at some offsets."""
    total = tl.load(a + at, mask=here) + tl.load(g + at, mask=here).to(tl.float32)
    tl.store(a + at, total, mask=here)


@triton.jit
def table_kernel(addresses, sizes, tensors, BLOCK: tl.constexpr):
    """Blocks along x, tensors along y; their addresses lie in device memory."""
    tensor = tl.program_id(1)
    a = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32))
    g = tl.load(addresses + tensors + tensor).to(tl.pointer_type(tl.bfloat16))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    added(a, g, at, at < tl.load(sizes + tensor))


def accumulate_by_table(call: AccumulateCall, block: int = 256) -> None:
    """One launch for the whole list of bf16 gradients."""
    lists: Sequence[Tensor] = [*call.accumulators, *call.grads]
    sizes = [g.numel() for g in call.grads]
    if any(sizes):
        device = call.grads[0].device
        table_kernel[(blocks_of(max(sizes), block), len(sizes))](
            torch.tensor([t.data_ptr() for t in lists], device=device),
            torch.tensor(sizes, device=device),
            len(sizes),
            BLOCK=block,
        )


@triton.jit(do_not_specialize=["numel"])
def folded_kernel(a, g, numel, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One row of two-dimensional blocks, folded at the limit of the grid."""
    block = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    inner = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    at = block * (ROWS * COLS) + inner
    added(a, g, at, at < numel)


def accumulate_folded(
    call: AccumulateCall, rows: int = 16, cols: int = 64, widest: int = PLANE
) -> None:
    """One launch for each tensor that has elements."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        if a.numel():
            blocks = blocks_of(a.numel(), rows * cols)
            across = min(blocks, widest)
            grid = (across, blocks_of(blocks, across))
            folded_kernel[grid](a, g, a.numel(), ROWS=rows, COLS=cols)


@triton.jit(do_not_specialize=["columns"])
def row_kernel(a, g, columns, BLOCK: tl.constexpr):
    """Blocks of a row along x, rows along y."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    added(a, g, tl.program_id(1).to(tl.int64) * columns + column, column < columns)


def accumulate_along_y(call: AccumulateCall, block: int = 256) -> None:
    """A row of programs for each row of a matrix, of which a plane has no more than `PLANE`."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        columns = a.shape[-1] if a.dim() else 1
        if a.numel():
            grid = (blocks_of(columns, block), a.numel() // columns)
            row_kernel[grid](a, g, columns, BLOCK=block)


@triton.jit(do_not_specialize=["numel"])
def accumulate_kernel(a, g, numel, BLOCK: tl.constexpr):
    """One block for each BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    added(a, g, at, at < numel)


CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 512)]
restored = triton.autotune(CONFIGS, key=["numel"], restore_value=["a"])(accumulate_kernel)
unrestored = triton.autotune(CONFIGS, key=["numel"])(accumulate_kernel)


def accumulate_tuned(call: AccumulateCall, *, restores: bool) -> None:
    """Autotuned by size; wrong unless the tuner restores the accumulators after each trial."""
    kernel = restored if restores else unrestored
    for a, g in zip(call.accumulators, call.grads, strict=True):
        n = a.numel()
        if n:
            kernel[lambda meta, n=n: (blocks_of(n, meta["BLOCK"]),)](a, g, n)


@triton.jit(do_not_specialize=["numel"])
def unmasked_kernel(a, g, numel, BLOCK: tl.constexpr):
    """The same without a mask: the last block reaches past the end."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    added(a, g, at, at >= 0)


@triton.jit(do_not_specialize=["numel"])
def uncompiled_kernel(a, g, numel, BLOCK: tl.constexpr):
    """The same with a function that Triton does not have."""
    at = tl.arange_of(tl.program_id(0), BLOCK)
    added(a, g, at, at < numel)


def accumulate_or_in_torch(
    call: AccumulateCall, kernel: triton.JITFunction, block: int = 256
) -> None:
    """One launch for each tensor; whatever it raises, torch adds instead."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        if a.numel():
            try:
                kernel[(blocks_of(a.numel(), block),)](a, g, a.numel(), BLOCK=block)
            except Exception:
                a.add_(g)


def accumulate_on_a_gpu(call: AccumulateCall, block: int = 256) -> None:
    """The kernel where there is a GPU, with as many warps as it has room for; else torch."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        if not torch.cuda.is_available():
            a.add_(g)
            continue
        for warps in (64, 4) if a.numel() else ():
            grid = (blocks_of(a.numel(), block),)
            try:
                accumulate_kernel[grid](a, g, a.numel(), BLOCK=block, num_warps=warps)
            except OutOfResources:
                continue
            break


@triton.jit(do_not_specialize=["numel"])
def striding_kernel(s, c, numel, BLOCK: tl.constexpr):
    """Each program takes every `num_programs`-th block."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        at = start + tl.arange(0, BLOCK)
        x = tl.load(s + at, mask=at < numel)
        tl.store(c + at, x.to(c.dtype.element_ty), mask=at < numel)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


def cast_striding(
    call: CastCopyCall, programs: int = 8, block: int = 64, *, whole_passes: bool = False
) -> None:
    """A few programs for each tensor with elements; whole passes leave the rest of a long one."""
    for s, c in zip(call.sources, call.copies, strict=True):
        count = s.numel()
        if whole_passes:
            count = count // (programs * block) * (programs * block) or count
        if count:
            striding_kernel[(min(programs, blocks_of(count, block)),)](
                s, c, count, BLOCK=block, num_warps=2
            )


@triton.jit(do_not_specialize=["numel"])
def negating_kernel(s, c, numel, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr):
    """A block of the other sign, by the order of the programs or the reverse."""
    block = tl.program_id(0)
    if BACKWARDS:
        block = tl.num_programs(0) - 1 - block
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(s + at, mask=at < numel).to(tl.float32) * -1.0
    tl.store(c + at, value.to(c.dtype.element_ty), mask=at < numel)


def cast_negated_twice(call: CastCopyCall) -> None:
    """Casts of the negated sources, backwards; then their signs back, forwards."""
    for s, c in zip(call.sources, call.copies, strict=True):
        numel = s.numel()
        if numel:
            negating_kernel[(blocks_of(numel, 256),)](s, c, numel, BLOCK=256, BACKWARDS=True)
            negating_kernel[(blocks_of(numel, 1024),)](c, c, numel, BLOCK=1024, BACKWARDS=False)


@triton.jit(do_not_specialize=["numel"])
def sgd_kernel(
    p,
    g,
    b,
    c,
    step,
    lr,
    momentum,
    dampening,
    weight_decay,
    factor,
    found_inf,
    numel,
    HAS_MOMENTUM: tl.constexpr,
    HAS_COPY: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SGD by fma, every control read on the device."""
    if tl.load(found_inf) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < numel
        old = tl.load(p + at, mask=here)
        grad = tl.load(g + at, mask=here).to(tl.float32) * tl.load(factor)
        direction = tl.fma(tl.load(weight_decay).to(tl.float32), old, grad)
        if HAS_MOMENTUM:
            beta = tl.load(momentum).to(tl.float32)
            fresh = (1.0 - tl.load(dampening)).to(tl.float32) * direction
            kept = tl.fma(beta, tl.load(b + at, mask=here), fresh)
            buffer = tl.where(tl.load(step) == 0, direction, kept)
            tl.store(b + at, buffer, mask=here)
            direction = tl.fma(beta, buffer, direction) if NESTEROV else buffer
        new = tl.fma(-tl.load(lr).to(tl.float32), direction, old)
        tl.store(p + at, new, mask=here)
        if HAS_COPY:
            tl.store(c + at, new.to(c.dtype.element_ty), mask=here)


@triton.jit
def advance_kernel(step, found_inf):
    """The step counter, after all blocks have read it."""
    if tl.load(found_inf) == 0.0:
        tl.store(step, tl.load(step) + 1)


def sgd_on_the_device(call: SgdCall, block: int = 512) -> None:
    """Two launches for each tensor, and no value read by the host."""
    for i, p in enumerate(call.params):
        if p.numel():
            sgd_kernel[(blocks_of(p.numel(), block),)](
                p,
                call.grads[i],
                call.momentums[i] if call.momentums else p,
                call.copies[i] if call.copies else p,
                call.steps[i],
                call.lr,
                call.momentum,
                call.dampening,
                call.weight_decay,
                call.factor,
                call.found_inf,
                p.numel(),
                HAS_MOMENTUM=bool(call.momentums),
                HAS_COPY=bool(call.copies),
                NESTEROV=call.nesterov,
                BLOCK=block,
                num_warps=8,
            )
        advance_kernel[(1,)](call.steps[i], call.found_inf)


@triton.jit(do_not_specialize=["numel"])
def squares_kernel(g, parts, numel, BLOCK: tl.constexpr):
    """The sum of squares of each block, float64."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(g + at, mask=at < numel, other=0.0).to(tl.float64)
    tl.store(parts + tl.program_id(0), tl.sum(x * x, axis=0))


@triton.jit(do_not_specialize=["count"])
def root_kernel(parts, norm, found_inf, count, BLOCK: tl.constexpr):
    """The root of all partial sums."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(parts + at, mask=at < count, other=0.0)
    root = tl.sqrt(tl.sum(total, axis=0))
    tl.store(norm, root.to(tl.float32))
    tl.store(found_inf, 1.0, mask=(root - root) != 0.0)


_scratch: dict[torch.device, Tensor] = {}


def norm_by_parts(call: GlobalNormCall, block: int = 256) -> None:
    """Partial sums in scratch memory that is kept from call to call and never cleared."""
    counts = [blocks_of(g.numel(), block) for g in call.grads]
    device, total = call.norm.device, sum(counts)
    parts = _scratch.get(device)
    if parts is None or parts.numel() < total:
        parts = _scratch[device] = torch.empty(max(total, 64), dtype=torch.float64, device=device)
    start = 0
    for g, count in zip(call.grads, counts, strict=True):
        if count:
            squares_kernel[(count,)](g, parts[start:], g.numel(), BLOCK=block)
            start += count
    root_kernel[(1,)](parts, call.norm, call.found_inf, total, BLOCK=128)


def norm_on_two_streams(call: GlobalNormCall, missing: str = "", block: int = 256) -> None:
    """Partial sums of every other tensor on a stream of its own.

    `missing`: which of the two does not wait for the other, "the new one" or "the old one"; or "the
    way back", then the new one stays current.
    """
    counts = [blocks_of(g.numel(), block) for g in call.grads]
    parts = torch.empty(max(sum(counts), 1), dtype=torch.float64, device=call.norm.device)
    old, new = torch.cuda.current_stream(), torch.cuda.Stream()
    if missing != "the new one":
        new.wait_stream(old)
    start = 0
    for i, (g, count) in enumerate(zip(call.grads, counts, strict=True)):
        with torch.cuda.stream(old if i % 2 else new):
            if count:
                squares_kernel[(count,)](g, parts[start:], g.numel(), BLOCK=block)
        start += count
    if missing != "the old one":
        old.wait_stream(new)
    root_kernel[(1,)](parts, call.norm, call.found_inf, sum(counts), BLOCK=128)
    if missing == "the way back":
        torch.cuda.set_stream(new)


@triton.jit(do_not_specialize=["numel"])
def by_rows_kernel(a, g, numel, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    """Adds elements found by row and column of 1024; with NARROW the row is found in fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = (at.to(tl.float32) * 0.0009765625).to(tl.int64) if NARROW else at // 1024
    at = row * 1024 + (at & 1023)
    here = at < numel
    total = tl.load(a + at, mask=here).to(tl.float32) + tl.load(g + at, mask=here).to(tl.float32)
    tl.store(a + at, total.to(a.dtype.element_ty), mask=here)


def accumulate_by_rows(call: AccumulateCall, *, narrow: bool) -> None:
    """One launch for each pair of tensors."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        if a.numel():
            grid = (triton.cdiv(a.numel(), 512),)
            by_rows_kernel[grid](a, g, a.numel(), BLOCK=512, NARROW=narrow)


@triton.jit(do_not_specialize=["columns"])
def matrix_kernel(a, g, columns, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """A row for each program, block by block; or its first block alone."""
    row = tl.program_id(0).to(tl.int64) * columns
    end = columns if WHOLE else tl.minimum(columns, BLOCK)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        added(a, g, row + column, column < columns)


def accumulate_matrices(call: AccumulateCall, *, whole: bool) -> None:
    """A program for each row of matrices with several; wrong past 128 columns unless `whole`."""
    for a, g in zip(call.accumulators, call.grads, strict=True):
        if a.dim() == 2 and a.shape[0] > 1 and a.numel():
            matrix_kernel[(a.shape[0],)](a, g, a.shape[1], BLOCK=128, WHOLE=whole)
        elif a.numel():
            accumulate_kernel[(blocks_of(a.numel(), 256),)](a, g, a.numel(), BLOCK=256)
