"""Atomic updates of global memory, within a block and between blocks."""

import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Draw, Run, case


@triton.jit
def histogram_kernel(x, counts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + at, at < n, other=0), 1, at < n)


@case(histogram_kernel, "x: *i32, counts: *i32, n: i32", constants={"BLOCK": 256}, grid=(3,))
def histogram_by_atomics(draw: Draw) -> Run:
    x = draw.integers(0, 10, 700)
    want = torch.bincount(x, minlength=10).int()
    return Run({"x": x, "counts": torch.zeros_like(want), "n": 700}, {"counts": want})


@triton.jit
def extremes_kernel(x, y, out, real, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0)
    tl.atomic_max(out + at % 4, v, at < n)
    tl.atomic_min(out + 4 + at % 4, v, at < n)
    tl.atomic_or(out + 8 + at % 4, v, at < n)
    tl.atomic_and(out + 12 + at % 4, v, at < n)
    tl.atomic_xor(out + 16 + at % 4, v, at < n)
    tl.atomic_max(real + at * 0, tl.load(y + at, at < n, other=-9.0), at < n)


@case(
    extremes_kernel,
    "x: *i32, y: *fp32, out: *i32, real: *fp32, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def atomic_extremes_and_bits(draw: Draw) -> Run:
    x, y = draw.integers(-999, 999, 200), draw.reals(200)
    out = torch.zeros(20, dtype=torch.int32)
    want = out.clone()
    for column in range(4):
        part = x[column::4].tolist()
        either, all_, odd = 0, 0, 0
        for value in part:
            either, all_, odd = either | value, all_ & value, odd ^ value
        row = [max(0, *part), min(0, *part), either, all_, odd]
        want[column::4] = torch.tensor(row, dtype=torch.int32)
    real = torch.full((1,), -9.0)
    wants = {"out": want, "real": y.max().reshape(1)}
    return Run({"x": x, "y": y, "out": out, "real": real, "n": 200}, dict(wants))


@triton.jit
def add_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0.0)
    tl.atomic_add(out + at % 64, v, at < n, sem="relaxed")


@case(add_kernel, "x: *fp32, out: *fp32, n: i32", constants={"BLOCK": 128}, grid=(3,))
def atomic_sums_of_fp32(draw: Draw) -> Run:
    """Small integers: every order gives the same sums."""
    x = draw.integers(-99, 99, 384).float()
    want = x.reshape(6, 64).sum(0)
    return Run({"x": x, "out": torch.zeros(64), "n": 384}, {"out": want})


@case(add_kernel, "x: *fp16, out: *fp16, n: i32", constants={"BLOCK": 256}, grid=(2,))
def atomic_sums_of_fp16(draw: Draw) -> Run:
    x = draw.integers(-99, 99, 512).half()
    want = x.reshape(8, 64).float().sum(0).half()
    return Run({"x": x, "out": torch.zeros(64).half(), "n": 512}, {"out": want})


@triton.jit
def last_kernel(x, partial, tickets, out, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    program = tl.program_id(0)
    v = tl.load(x + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(partial + program, tl.sum(v))
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets, 1)
    if ticket == PROGRAMS - 1:
        all_ = tl.load(partial + tl.arange(0, PROGRAMS))
        tl.store(out, tl.sum(all_))


@case(
    last_kernel,
    "x: *i32, partial: *i32, tickets: *i32, out: *i32",
    constants={"BLOCK": 64, "PROGRAMS": 4},
    grid=(4,),
    warps=2,
)
def the_last_block_sums(draw: Draw) -> Run:
    x = draw.integers(-9999, 9999, 4, 64)
    partial = x.sum(1).int()
    wants = {
        "partial": partial,
        "tickets": torch.tensor([4], dtype=torch.int32),
        "out": partial.sum().int().reshape(1),
    }
    zeros = {name: torch.zeros_like(want) for name, want in wants.items()}
    return Run({"x": x, **zeros}, dict(wants))


@triton.jit
def lock_kernel(lock, total, order):
    program = tl.program_id(0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    old = tl.load(total)
    tl.store(total, old * 3 + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)
    tl.atomic_xchg(order + program, 1)


@case(lock_kernel, "lock: *i32, total: *i64, order: *i32", grid=(6,), warps=1)
def a_spin_lock_takes_turns(draw: Draw) -> Run:
    total = torch.zeros(1, dtype=torch.int64)
    value = 0
    for _ in range(6):
        value = value * 3 + 1
    lock, order = torch.zeros(1).int(), torch.zeros(6).int()
    wants = {"lock": lock.clone(), "total": torch.tensor([value]), "order": torch.ones(6).int()}
    return Run({"lock": lock, "total": total, "order": order}, dict(wants))
