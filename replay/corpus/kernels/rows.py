"""Softmax and normalisations, one row for each program."""

import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Argument, Draw, Near, Run, case

HALF = 2.0**-24
"""Largest relative error of one fp32 rounding."""


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    v = tl.load(x + row + at, at < columns, other=float("-inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row + at, (e / tl.sum(e, axis=0)).to(out.dtype.element_ty), at < columns)


def softmax(x: torch.Tensor, stored: float) -> Run:
    rows, columns = x.shape
    wide = x.double()
    spread = (wide - wide.max(1, keepdim=True).values).abs()
    values = wide.softmax(1)
    # Difference and exponent round with the spread's size; then ex2 2 ULP, ten sums, division.
    relative = (3 * spread * 1.45 + 3 * spread.max() * 1.45 + 4 + 4 + 12 + 4) * HALF + stored
    why = "exp of a rounded exponent in every term, ex2.approx 2 ULP, tree of sums, div.full"
    near = Near(values, values * relative + 2.0**-24 * stored, why)
    return Run({"x": x, "out": torch.empty_like(x), "columns": columns}, {"out": near})


@case(softmax_kernel, "x: *fp32, out: *fp32, columns: i32", constants={"BLOCK": 256}, grid=(3,))
def softmax_of_fp32(draw: Draw) -> Run:
    return softmax(draw.reals(3, 200), 0.0)


@case(
    softmax_kernel,
    "x: *bf16, out: *bf16, columns: i32",
    constants={"BLOCK": 512},
    grid=(2,),
    warps=8,
)
def softmax_of_bf16(draw: Draw) -> Run:
    return softmax(draw.reals(2, 391).bfloat16(), 2.0**-8)


@triton.jit
def layer_norm_kernel(x, out, w, b, mean_out, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, inside, other=0.0)
    mean = tl.sum(v, axis=0) / columns
    centred = tl.where(inside, v - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    y = centred * scale * tl.load(w + at, inside) + tl.load(b + at, inside)
    tl.store(out + row * columns + at, y, inside)
    tl.store(mean_out + row, mean)


@case(
    layer_norm_kernel,
    "x: *fp32, out: *fp32, w: *fp32, b: *fp32, mean_out: *fp32, columns: i32, eps: fp32",
    constants={"BLOCK": 256},
    grid=(3,),
)
def layer_norm(draw: Draw) -> Run:
    x, w, b = draw.reals(3, 200), draw.reals(200), draw.reals(200)
    wide = x.double()
    mean = wide.mean(1)
    size = wide.abs().mean(1)
    normal = torch.nn.functional.layer_norm(wide, (200,), eps=1e-5)
    values = normal * w + b
    deviation = (wide.var(1, correction=0) + 1e-5).sqrt()[:, None]
    # The mean is off by 12 roundings of the mean size; so is every centred value, over deviation.
    shift = 12 * HALF * size[:, None] / deviation
    error = (shift * (1 + normal.abs()) + 32 * HALF * normal.abs()) * w.abs() + 2 * HALF * (
        values.abs() + b.abs()
    )
    why = "12 roundings in the mean, which shifts every element; 32 in scale and product"
    arguments: dict[str, Argument] = {
        "x": x,
        "out": torch.empty_like(x),
        "w": w,
        "b": b,
        "mean_out": torch.empty(3),
    }
    arguments |= {"columns": 200, "eps": 1e-5}
    wants = {"out": Near(values, error, why), "mean_out": Near(mean, 12 * HALF * size, why)}
    return Run(arguments, dict(wants))


@triton.jit
def rms_norm_kernel(x, out, w, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, at < columns, other=0.0).to(tl.float32)
        total += v * v
    scale = tl.rsqrt(tl.sum(total, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, at < columns, other=0.0).to(tl.float32)
        y = v * scale * tl.load(w + at, at < columns).to(tl.float32)
        tl.store(out + row + at, y.to(out.dtype.element_ty), at < columns)


@case(
    rms_norm_kernel,
    "x: *bf16, out: *bf16, w: *bf16, columns: i32, eps: fp32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def rms_norm_in_a_loop(draw: Draw) -> Run:
    x, w = draw.reals(2, 300).bfloat16(), draw.reals(300).bfloat16()
    wide = x.double()
    values = wide * (wide.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * w.double()
    why = "the store to bf16 rounds by 2^-8, everything before it 40 times in fp32"
    near = Near(values, values.abs() * (2.0**-8 + 40 * HALF), why)
    arguments: dict[str, Argument] = {
        "x": x,
        "out": torch.empty_like(x),
        "w": w,
        "columns": 300,
        "eps": 1e-6,
    }
    return Run(arguments, {"out": near})


@triton.jit
def online_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, at < columns, other=float("-inf"))
        new = tl.maximum(top, tl.max(v, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(v - new), axis=0)
        top = new
    tl.store(out + tl.program_id(0), top + tl.log(total))


@case(online_kernel, "x: *fp32, out: *fp32, columns: i32", constants={"BLOCK": 64}, grid=(3,))
def log_sum_exp_online(draw: Draw) -> Run:
    x = draw.reals(3, 250)
    values = x.double().logsumexp(1)
    why = "a relative error of the sum is an absolute one of its logarithm: 64 roundings, exps of 8"
    error = torch.full((3,), (64 + 8 * 1.45 * 4) * HALF + 8 * HALF * 8, dtype=torch.float64)
    return Run({"x": x, "out": torch.empty(3), "columns": 250}, {"out": Near(values, error, why)})
