"""One thread, one element: loads, stores, masks, conversions, minima."""

import numpy as np
import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Argument, Draw, Run, case


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@case(add_kernel, "x: *fp32, y: *fp32, out: *fp32, n: i32", constants={"BLOCK": 256}, grid=(3,))
def add_vectors(draw: Draw) -> Run:
    x, y = draw.reals(700), draw.reals(700)
    return Run({"x": x, "y": y, "out": torch.empty(700), "n": 700}, {"out": x + y})


@case(
    add_kernel,
    "x: *fp32, y: *fp32, out: *fp32, n: i32",
    constants={"BLOCK": 256},
    grid=(2,),
    unaligned=("x", "y", "out"),
)
def add_misaligned(draw: Draw) -> Run:
    x, y = draw.reals(401)[1:], draw.reals(402)[2:]
    return Run({"x": x, "y": y, "out": torch.empty(403)[3:], "n": 400}, {"out": x + y})


@triton.jit
def scale_kernel(x, out, scale, shift, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, at < n, other=0.0).to(tl.float32) * scale + shift
    tl.store(out + at, y.to(out.dtype.element_ty), at < n)


@case(
    scale_kernel,
    "x: *bf16, out: *bf16, scale: fp32, shift: fp32, n: i32",
    constants={"BLOCK": 512},
    grid=(2,),
)
def scale_bf16(draw: Draw) -> Run:
    """8 bits times 24 bits plus 24 bits of like size: float64 holds what the fma rounds."""
    x = draw.reals(900).bfloat16()
    scale, shift = float(np.float32(1.7)), float(np.float32(-0.3))
    want = (x.double() * scale + shift).float().bfloat16()
    arguments: dict[str, Argument] = {
        "x": x,
        "out": torch.empty_like(x),
        "scale": scale,
        "shift": shift,
        "n": 900,
    }
    return Run(arguments, {"out": want})


@triton.jit
def clamp_kernel(x, out, low, high, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    quiet = tl.minimum(tl.maximum(v, low), high)
    kept = tl.maximum(v, low, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, tl.where(v > 0, quiet, kept), at < n)


@case(
    clamp_kernel,
    "x: *fp32, out: *fp32, low: fp32, high: fp32, n: i32",
    constants={"BLOCK": 256},
    grid=(2,),
)
def clamp_patterns(draw: Draw) -> Run:
    x = draw.patterns(400, dtype=torch.float32)
    x[:8] = torch.tensor([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 7.0])
    want = torch.where(x > 0, x.clamp(-1, 5), torch.where(x.isnan(), x, x.clamp(min=-1)))
    arguments: dict[str, Argument] = {
        "x": x,
        "out": torch.empty_like(x),
        "low": -1.0,
        "high": 5.0,
        "n": 400,
    }
    return Run(arguments, {"out": want})


@triton.jit
def cast_kernel(x, half, brain, wide, whole, small, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0.0)
    tl.store(half + at, v.to(tl.float16), at < n)
    tl.store(brain + at, v.to(tl.bfloat16), at < n)
    tl.store(wide + at, v.to(tl.float64), at < n)
    tl.store(whole + at, v.to(tl.int32), at < n)
    tl.store(small + at, v.to(tl.int32).to(tl.int8), at < n)


@case(
    cast_kernel,
    "x: *fp32, half: *fp16, brain: *bf16, wide: *fp64, whole: *i32, small: *i8, n: i32",
    constants={"BLOCK": 256},
    grid=(2,),
)
def casts_from_fp32(draw: Draw) -> Run:
    x = draw.reals(400, low=-70000, high=70000)
    x[:6] = torch.tensor([0.0, -0.0, 65519.99, 65520.0, 2.0**-24, 1e-40])
    whole = x.double().trunc().to(torch.int32)
    outs = {
        "half": x.half(),
        "brain": x.bfloat16(),
        "wide": x.double(),
        "whole": whole,
        "small": whole.to(torch.int8),
    }
    empty = {name: torch.empty_like(want) for name, want in outs.items()}
    return Run({"x": x, **empty, "n": 400}, dict(outs))


@triton.jit
def widen_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n).to(tl.float32)
    b = tl.load(y + at, at < n).to(tl.float32)
    tl.store(out + at, tl.where(a > b, a, -b), at < n)


@case(widen_kernel, "x: *fp16, y: *bf16, out: *fp32, n: i32", constants={"BLOCK": 512}, grid=(2,))
def widened_patterns(draw: Draw) -> Run:
    x, y = draw.patterns(900, dtype=torch.float16), draw.patterns(900, dtype=torch.bfloat16)
    a, b = x.float(), y.float()
    out = torch.empty(900)
    return Run({"x": x, "y": y, "out": out, "n": 900}, {"out": torch.where(a > b, a, -b)})


@triton.jit
def strided_kernel(x, out, rows, columns, stride, R: tl.constexpr, C: tl.constexpr):
    i = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    j = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    inside = (i < rows) & (j < columns)
    v = tl.load(x + i * stride + j, inside, other=0)
    tl.store(out + j * rows + i, v, inside)


@case(
    strided_kernel,
    "x: *i16, out: *i16, rows: i32, columns: i32, stride: i32",
    constants={"R": 16, "C": 32},
    grid=(2, 2),
)
def transposed_copy(draw: Draw) -> Run:
    x = draw.integers(-30000, 30000, 21, 64, dtype=torch.int16)
    arguments: dict[str, Argument] = {"x": x, "out": torch.empty(45, 21, dtype=torch.int16)}
    arguments |= {"rows": 21, "columns": 45, "stride": 64}
    return Run(arguments, {"out": x[:, :45].T.contiguous()})
