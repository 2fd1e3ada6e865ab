"""CUDA C++ kernels: what NVRTC makes of the files under `cuda/`."""

from __future__ import annotations

import struct

import numpy as np
import torch

from twinstep.replay.corpus.case import Argument, Draw, Run, cuda_case, summed

Pair = tuple[torch.Tensor, torch.Tensor]


@cuda_case("axpy.cu", "axpy", "a: f32, x: p, y: p, n: s32", grid=(2,))
def axpy(draw: Draw) -> Run:
    """Integers small enough that neither product nor sum is rounded, fused or not."""
    x, y = draw.integers(-999, 999, 815).float(), draw.integers(-999, 999, 815).float()
    return Run({"a": 2.5, "x": x, "y": y, "n": 815}, {"y": x * 2.5 + y})


@cuda_case("sums.cu", "row_sums", "x: p, out: p, columns: s32", grid=(3,), block=(96,))
def row_sums_by_shuffles(draw: Draw) -> Run:
    x = draw.reals(3, 300)
    want = summed(
        x.double().sum(1), x.double().abs().sum(1), 14, "four strides and ten levels round once"
    )
    return Run({"x": x, "out": torch.empty(3), "columns": 300}, {"out": want})


@cuda_case("sums.cu", "norm64", "x: p, out: p, n: s64", block=(64,), options={"shared": 512})
def norm_in_float64(draw: Draw) -> Run:
    """Small integers: the sum of squares is exact, and the root is rounded once."""
    x = draw.integers(-(2**20), 2**20, 300, dtype=torch.float64)
    want = x.square().sum().sqrt().reshape(1)
    return Run({"x": x, "out": torch.empty_like(want), "n": 300}, {"out": want})


@cuda_case("scans.cu", "running_sum", "x: p, out: p", grid=(2,))
def running_sum_in_shared_memory(draw: Draw) -> Run:
    x = draw.integers(-(2**31), 2**31, 2, 128)
    return Run({"x": x, "out": torch.empty_like(x)}, {"out": x.long().cumsum(1).int()})


@cuda_case("scans.cu", "keep_positive", "x: p, out: p, counts: p, n: s32", grid=(2,))
def kept_elements(draw: Draw) -> Run:
    x = draw.integers(-9, 9, 200)
    out, counts = torch.zeros(2, 128, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    want = out.clone()
    for block in range(2):
        kept = [v for v in x[128 * block : 128 * block + 128].tolist() if v > 0]
        want[block, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        counts[block] = len(kept)
    arguments: dict[str, Argument] = {
        "x": x,
        "out": out,
        "counts": torch.zeros_like(counts),
        "n": 200,
    }
    return Run(arguments, {"out": want, "counts": counts})


@cuda_case("histogram.cu", "histogram", "x: p, counts: p, n: s32", grid=(2,))
def histogram_in_shared_memory(draw: Draw) -> Run:
    x = draw.integers(0, 256, 700).to(torch.uint8)
    want = torch.bincount(x, minlength=256).int()
    return Run({"x": x, "counts": torch.zeros_like(want), "n": 700}, {"counts": want})


@cuda_case("histogram.cu", "argmax", "x: p, best: p, n: s32", grid=(3,))
def argmax_by_compare_and_swap(draw: Draw) -> Run:
    x = draw.integers(-50, 50, 300).float()
    at = x.tolist().index(max(x.tolist()))
    bits = int(x[at].view(torch.int32)) % 2**32
    key = bits ^ 0xFFFFFFFF if bits >> 31 else bits | 1 << 31
    word = key << 32 | (0xFFFFFFFF - at)
    want = torch.tensor([word - (1 << 64) if word >> 63 else word])
    return Run({"x": x, "best": torch.zeros_like(want), "n": 300}, {"best": want})


def _pairs(draw: Draw, dtype: torch.dtype) -> Pair:
    x = draw.integers(-99, 99, 400).to(dtype) / 8
    return x, draw.integers(-99, 99, 400).to(dtype) / 4


@cuda_case("halves.cu", "half_pairs", "x: p, y: p, out: p, pairs: s32", grid=(2,))
def pairs_of_fp16(draw: Draw) -> Run:
    """The fused product fits float64 and fp32, which then is rounded once."""
    x, y = _pairs(draw, torch.float16)
    fused = (x.double() * y.double() + x.double()).float().half()
    arguments: dict[str, Argument] = {"x": x, "y": y, "out": torch.empty_like(x), "pairs": 200}
    return Run(arguments, {"out": torch.maximum(fused, -y)})


@cuda_case("halves.cu", "brain_pairs", "x: p, y: p, out: p, pairs: s32", grid=(2,))
def pairs_of_bf16(draw: Draw) -> Run:
    x, y = _pairs(draw, torch.bfloat16)
    want = (x.double() * y.double() + x.double()).float().bfloat16()
    return Run({"x": x, "y": y, "out": torch.empty_like(x), "pairs": 200}, {"out": want})


@cuda_case("halves.cu", "convert_pairs", "x: p, half: p, brain: p, pairs: s32", grid=(2,))
def pairs_converted(draw: Draw) -> Run:
    x = draw.patterns(400, dtype=torch.float32)
    wants = {"half": x.half(), "brain": x.bfloat16()}
    empty = {name: torch.empty_like(want) for name, want in wants.items()}
    return Run({"x": x, **empty, "pairs": 200}, dict(wants))


@cuda_case(
    "tiles.cu", "transpose", "x: p, out: p, rows: s32, columns: s32", grid=(3, 2), block=(16, 16)
)
def transpose_in_shared_memory(draw: Draw) -> Run:
    x = draw.reals(25, 40)
    arguments: dict[str, Argument] = {"x": x, "out": torch.empty(40, 25), "rows": 25, "columns": 40}
    return Run(arguments, {"out": x.T.contiguous()})


@cuda_case("tiles.cu", "reverse_rows", "x: p, out: p", grid=(2,), block=(64,))
def rows_copied_asynchronously(draw: Draw) -> Run:
    x = draw.integers(-99, 99, 2, 256)
    return Run({"x": x, "out": torch.empty_like(x)}, {"out": x.flip(1)})


@cuda_case("threads.cu", "median9", "x: p, out: p, n: s32", grid=(2,), block=(64,))
def medians_in_local_arrays(draw: Draw) -> Run:
    x = draw.reals(100)
    rows = [sorted(x[max(0, i - 4) : i + 5].tolist()) for i in range(100)]
    want = torch.tensor([row[len(row) // 2] for row in rows])
    return Run({"x": x, "out": torch.empty(100), "n": 100}, {"out": want})


@cuda_case("threads.cu", "machine", "program: p, out: p, length: s32", grid=(2,), block=(64,))
def a_switch_for_each_thread(draw: Draw) -> Run:
    program = draw.integers(0, 32, 12, 64)
    program[program > 7] %= 7
    results = [machine(at, program[:, at % 64].tolist()) for at in range(128)]
    want = torch.tensor(results, dtype=torch.int32)
    arguments: dict[str, Argument] = {
        "program": program.to(torch.uint8),
        "out": torch.empty_like(want),
        "length": 12,
    }
    return Run(arguments, {"out": want})


def wrapped(value: int) -> int:
    """The int32 of the same low bits."""
    return (value + 2**31) % 2**32 - 2**31


def machine(at: int, program: list[int]) -> int:
    """Result of one thread of `machine`."""
    a, b = at, 1
    for code in program:
        if code == 0:
            a = wrapped(a + b)
        elif code == 1:
            b = wrapped(a ^ wrapped(b << 3))
        elif code == 2:
            a = wrapped(a * 5)
        elif code == 3:
            b = wrapped(b - at)
        elif code == 4:
            a = a if b > 0 else wrapped(-a)
        elif code == 5:
            a >>= 1
        elif code == 6:
            b = ~b
        else:
            return wrapped(a - b)
    return wrapped(a + b)


@cuda_case("threads.cu", "votes", "x: p, out: p", grid=(2,), block=(64,))
def masks_of_a_warp(draw: Draw) -> Run:
    x = draw.integers(-4, 8, 128)
    words = [word for warp in x.reshape(4, 32).tolist() for word in votes(warp)]
    want = torch.tensor([wrapped(word) for word in words], dtype=torch.int32)
    return Run({"x": x, "out": torch.empty_like(want)}, {"out": want})


def votes(warp: list[int]) -> list[int]:
    """Results of the threads of one warp in `votes`."""
    words = []
    for lane, value in enumerate(warp):
        word = 3 * sum(1 << other for other in range(32) if warp[other] == value)
        word += sum(1 << other for other in range(32) if warp[other] > 0)
        word = word % 2**32 ^ (0x100 if 7 in warp else 0x200)
        word += 5 if min(warp) > -50 else 9
        word = (word + sum(warp)) % 2**32 ^ max(warp) % 2**32
        word += warp[lane ^ 9] + 2 * warp[lane - 1 if lane % 8 else lane]
        if lane % 2:
            word += 16 + warp[lane ^ 2]
        words.append(word)
    return words


@cuda_case(
    "adamw.cu",
    "adamw",
    "list: struct, lr: f32, b1: f32, b2: f32, k1: f32, k2: f32, eps: f32, wd: f32",
    grid=(2, 4),
    block=(64,),
    options={"fmad": False},
)
def adamw_over_a_list(draw: Draw) -> Run:
    """The equation in torch; a structure of addresses is written as a tuple of its tensors."""
    sizes = (1, 200, 0, 130)
    numbers = {"lr": 0.01, "b1": 0.9, "b2": 0.99, "k1": 0.3, "k2": 0.02, "eps": 1e-8, "wd": 0.1}
    lr, b1, b2, k1, k2, eps, wd = (torch.tensor(x) for x in numbers.values())
    columns: list[list[torch.Tensor]] = []
    wants: list[list[torch.Tensor]] = []
    for n in sizes:
        p, g, m, v = draw.reals(n), draw.reals(n), draw.reals(n), draw.reals(n, low=0.0)
        m1 = b1 * m + (1 - b1) * g
        v1 = b2 * v + (1 - b2) * g * g
        p1 = p - lr * ((m1 / k1) / ((v1 / k2).double().sqrt().float() + eps) + wd * p)
        columns.append([p, g, m, v])
        wants.append([p1, g, m1, v1])
    flat = [column[row] for row in range(4) for column in columns]
    wanted = {f"list[{i}]": wants[i % 4][i // 4] for i in range(16)}
    tail = struct.pack("4i", *sizes)
    return Run(
        {"list": (*flat, torch.from_numpy(np.frombuffer(tail, np.uint8).copy())), **numbers},
        dict(wanted),
    )
