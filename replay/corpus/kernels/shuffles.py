"""Elements that change threads: gathers, transposes, histograms by vote."""

import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Draw, Run, case


@triton.jit
def gather_kernel(x, index, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(index + at), 0))


@case(
    gather_kernel, "x: *fp32, index: *i32, out: *fp32", constants={"BLOCK": 64}, grid=(2,), warps=2
)
def gathered_elements(draw: Draw) -> Run:
    x, index = draw.reals(2, 64), draw.integers(0, 64, 2, 64)
    want = x.gather(1, index.long())
    return Run({"x": x, "index": index, "out": torch.empty_like(x)}, {"out": want})


@triton.jit
def warp_gather_kernel(x, index, out, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(index + at), 0))


@case(
    warp_gather_kernel,
    "x: *i32, index: *i32, out: *i32",
    constants={"R": 32, "C": 4},
    warps=1,
)
def gathered_rows(draw: Draw) -> Run:
    x, index = draw.integers(-99, 99, 32, 4), draw.integers(0, 32, 32, 4)
    want = x.gather(0, index.long())
    return Run({"x": x, "index": index, "out": torch.empty_like(x)}, {"out": want})


@triton.jit
def transpose_kernel(x, out, R: tl.constexpr, C: tl.constexpr):
    tile = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    turned = tl.trans(tile)
    tl.store(out + tl.arange(0, C)[:, None] * R + tl.arange(0, R)[None, :], turned)


@case(transpose_kernel, "x: *fp16, out: *fp16", constants={"R": 32, "C": 64})
def transposed_tile(draw: Draw) -> Run:
    x = draw.patterns(32, 64, dtype=torch.float16)
    out = torch.empty(64, 32, dtype=torch.float16)
    return Run({"x": x, "out": out}, {"out": x.T.contiguous()})


@triton.jit
def weave_kernel(x, y, out, back, BLOCK: tl.constexpr):
    a = tl.load(x + tl.arange(0, BLOCK))
    b = tl.load(y + tl.arange(0, BLOCK))
    woven = tl.interleave(a, b)
    tl.store(out + tl.arange(0, 2 * BLOCK), woven)
    first, second = tl.split(tl.reshape(woven, (BLOCK, 2)))
    tl.store(back + tl.arange(0, BLOCK), tl.flip(first, 0) - second)


@case(weave_kernel, "x: *i32, y: *i32, out: *i32, back: *i32", constants={"BLOCK": 64}, warps=2)
def woven_and_flipped(draw: Draw) -> Run:
    x, y = draw.integers(-99, 99, 64), draw.integers(-99, 99, 64)
    wants = {"out": torch.stack([x, y], 1).reshape(-1), "back": x.flip(0) - y}
    empty = {name: torch.empty_like(want) for name, want in wants.items()}
    return Run({"x": x, "y": y, **empty}, dict(wants))


@triton.jit
def counts_kernel(x, out, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x + at, at < n, other=BINS - 1), BINS)
    tl.store(out + tl.arange(0, BINS), counts)


@case(
    counts_kernel,
    "x: *i32, out: *i32, n: i32",
    constants={"BLOCK": 256, "BINS": 16},
)
def histogram_by_votes(draw: Draw) -> Run:
    x = draw.integers(0, 16, 200)
    want = torch.bincount(x, minlength=16).int()
    want[15] += 56
    return Run({"x": x, "out": torch.empty_like(want), "n": 200}, {"out": want})
