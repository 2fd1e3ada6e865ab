"""Reductions within threads, warps and blocks."""

import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Argument, Draw, Run, case, summed


@triton.jit
def sum_kernel(x, out, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * columns + at, at < columns, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(v.to(tl.float32)))


def row_sums(x: torch.Tensor) -> Run:
    """A tree adds every element at most log2(block) + 1 times, far below one a column."""
    rows, columns = x.shape
    why = "each of the additions on an element's way rounds once"
    want = summed(x.double().sum(1), x.double().abs().sum(1), 12, why)
    return Run({"x": x, "out": torch.empty(rows), "columns": columns}, {"out": want})


@case(sum_kernel, "x: *fp32, out: *fp32, columns: i32", constants={"BLOCK": 512}, grid=(3,))
def sums_of_fp32(draw: Draw) -> Run:
    return row_sums(draw.reals(3, 500))


@case(sum_kernel, "x: *bf16, out: *fp32, columns: i32", constants={"BLOCK": 512}, grid=(3,))
def sums_of_bf16(draw: Draw) -> Run:
    return row_sums(draw.reals(3, 497).bfloat16())


@case(
    sum_kernel, "x: *fp16, out: *fp32, columns: i32", constants={"BLOCK": 1024}, grid=(2,), warps=8
)
def sums_of_fp16(draw: Draw) -> Run:
    return row_sums(draw.reals(2, 800).half())


@triton.jit
def exact_sum_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0)
    tl.store(out, tl.sum(v.to(out.dtype.element_ty)))


@case(exact_sum_kernel, "x: *fp32, out: *fp64, n: i32", constants={"BLOCK": 1024})
def exact_sum_in_float64(draw: Draw) -> Run:
    """Multiples of 2^-10 below 2^10: float64 holds every partial sum."""
    x = draw.integers(-(2**20), 2**20, 1000).float() / 1024
    want = x.double().sum().reshape(1)
    return Run({"x": x, "out": torch.empty_like(want), "n": 1000}, {"out": want})


@case(exact_sum_kernel, "x: *i32, out: *i64, n: i32", constants={"BLOCK": 512})
def exact_sum_of_integers(draw: Draw) -> Run:
    x = draw.integers(-(2**31), 2**31, 500)
    want = x.long().sum().reshape(1)
    return Run({"x": x, "out": torch.empty_like(want), "n": 500}, {"out": want})


@triton.jit
def argmax_kernel(x, value, index, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, at < columns, other=float("-inf"))
    best, where = tl.max(v, axis=0, return_indices=True)
    tl.store(value + row, best)
    tl.store(index + row, where)
    tl.store(index + tl.num_programs(0) + row, tl.argmin(tl.where(at < columns, v, 1e30), axis=0))


@case(
    argmax_kernel,
    "x: *fp32, value: *fp32, index: *i32, columns: i32",
    constants={"BLOCK": 256},
    grid=(4,),
)
def argmax_takes_the_first(draw: Draw) -> Run:
    x = draw.integers(-9, 9, 4, 200).float()
    first = torch.tensor([row.index(max(row)) for row in x.tolist()])
    least = torch.tensor([row.index(min(row)) for row in x.tolist()])
    wants = {"value": x.max(1).values, "index": torch.cat([first, least]).int()}
    arguments: dict[str, Argument] = {
        "x": x,
        "value": torch.empty(4),
        "index": torch.empty(8).int(),
        "columns": 200,
    }
    return Run(arguments, dict(wants))


@triton.jit
def columns_kernel(x, out, R: tl.constexpr, C: tl.constexpr):
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    v = tl.load(x + i * C + j)
    tl.store(out + tl.arange(0, C), tl.sum(v, axis=0))
    tl.store(out + C + tl.arange(0, R), tl.max(v, axis=1))


@case(columns_kernel, "x: *i32, out: *i32", constants={"R": 16, "C": 64})
def reductions_along_both_axes(draw: Draw) -> Run:
    x = draw.integers(-1000, 1000, 16, 64)
    want = torch.cat([x.sum(0), x.max(1).values]).int()
    return Run({"x": x, "out": torch.empty_like(want)}, {"out": want})


@triton.jit
def bits_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0)
    tl.store(out, tl.xor_sum(v))
    tl.store(out + 1, tl.min(tl.where(at < n, v, 2147483647)))
    tl.store(out + 2, tl.max(v))
    tl.store(out + 3, tl.reduce_or(v, 0))


@case(bits_kernel, "x: *i32, out: *i32, n: i32", constants={"BLOCK": 256}, warps=2)
def reductions_of_bits(draw: Draw) -> Run:
    x = draw.integers(-(2**28), 2**28, 250) & ~0x1010
    both, either = 0, 0
    for value in x.tolist():
        both, either = both ^ value, either | value
    want = torch.tensor([both, min(x.tolist()), max(0, *x.tolist()), either], dtype=torch.int32)
    return Run({"x": x, "out": torch.empty_like(want), "n": 250}, {"out": want})


@triton.jit
def welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    delta = mean_b - mean_a
    share = tl.where(n == 0.0, 0.0, n_b / n)
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


@triton.jit
def variance_kernel(x, out, BLOCK: tl.constexpr):
    v = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    mean, m2, n = tl.reduce((v, v * 0.0, v * 0.0 + 1.0), 0, welford)
    tl.store(out + 2 * tl.program_id(0), mean)
    tl.store(out + 2 * tl.program_id(0) + 1, m2 / n)


@case(variance_kernel, "x: *fp32, out: *fp32", constants={"BLOCK": 128}, grid=(3,))
def running_variance(draw: Draw) -> Run:
    x = draw.reals(3, 128)
    wide = x.double()
    values = torch.stack([wide.mean(1), wide.var(1, correction=0)], 1)
    sizes = torch.stack([wide.abs().mean(1), 4 * wide.pow(2).mean(1)], 1)
    why = "7 levels; each rounds 4 times for the mean, 8 for the variance, divisions 2 ULP"
    return Run({"x": x, "out": torch.empty(3, 2)}, {"out": summed(values, sizes, 7 * 12, why)})
