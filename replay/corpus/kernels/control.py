"""Loops and branches, alike for a block and different from element to element."""

import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Argument, Draw, Run, case


@triton.jit
def collatz_kernel(x, out):
    v = tl.load(x + tl.program_id(0))
    count = 0
    while v != 1:
        if v % 2 == 0:  # noqa: SIM108 - a branch is the point
            v = v // 2
        else:
            v = 3 * v + 1
        count += 1
    tl.store(out + tl.program_id(0), count)


@case(collatz_kernel, "x: *i64, out: *i32", grid=(12,), warps=1)
def collatz_loops_for_its_own_time(draw: Draw) -> Run:
    x = draw.integers(1, 5000, 12, dtype=torch.int64)
    counts = []
    for start in x.tolist():
        value, count = start, 0
        while value != 1:
            value, count = (3 * value + 1 if value % 2 else value // 2), count + 1
        counts.append(count)
    want = torch.tensor(counts, dtype=torch.int32)
    return Run({"x": x, "out": torch.empty_like(want)}, {"out": want})


@triton.jit
def gcd_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    while tl.max(b) > 0:
        rest = tl.where(b > 0, a % tl.maximum(b, 1), 0)
        a, b = tl.where(b > 0, b, a), rest
    tl.store(out + at, a)


@case(gcd_kernel, "x: *i32, y: *i32, out: *i32", constants={"BLOCK": 128}, grid=(2,))
def greatest_common_divisors(draw: Draw) -> Run:
    x, y = draw.integers(1, 100000, 256), draw.integers(0, 100000, 256)
    return Run({"x": x, "y": y, "out": torch.empty_like(x)}, {"out": torch.gcd(x, y)})


@triton.jit
def choose_kernel(x, out, mode, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    kind = tl.load(mode + program)
    if kind == 0:
        v = v + 1
    elif kind == 1:
        v = v * v
    elif kind == 2:
        for _ in range(5):
            v = v * 3 - program
    else:
        return
    tl.store(out + at, v)


@case(choose_kernel, "x: *i32, out: *i32, mode: *i32", constants={"BLOCK": 64}, grid=(5,), warps=2)
def programs_take_different_branches(draw: Draw) -> Run:
    x = draw.integers(-99, 99, 5, 64)
    mode = torch.tensor([2, 0, 3, 1, 2], dtype=torch.int32)
    out = torch.full_like(x, -7)
    want = out.clone()
    want[1], want[3] = x[1] + 1, x[3] * x[3]
    for row in (0, 4):
        v = x[row]
        for _ in range(5):
            v = v * 3 - row
        want[row] = v
    return Run({"x": x, "out": out, "mode": mode}, {"out": want})


@triton.jit
def search_kernel(keys, x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + n
    for _ in range(8):
        middle = (low + high) // 2
        open_ = low < high
        right = tl.load(keys + middle, open_, other=0.0) < v
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & ~right, middle, high)
    tl.store(out + at, low)


@case(
    search_kernel,
    "keys: *fp32, x: *fp32, out: *i32, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def binary_search(draw: Draw) -> Run:
    keys, x = draw.reals(200).sort().values, draw.reals(256)
    x[:50] = keys[:50]
    want = torch.searchsorted(keys, x).int()
    return Run({"keys": keys, "x": x, "out": torch.empty_like(want), "n": 200}, {"out": want})


@triton.jit
def nested_kernel(x, out, rows, columns, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int64)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        width = tl.minimum(columns, i + 1)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(x + i * columns + at, at < width, other=0).to(tl.int64)
    tl.store(out + tl.program_id(0), tl.sum(total))


@case(
    nested_kernel,
    "x: *i32, out: *i64, rows: i32, columns: i32",
    constants={"BLOCK": 32},
    grid=(3,),
    warps=1,
)
def nested_loops_of_own_length(draw: Draw) -> Run:
    x = draw.integers(-(2**30), 2**30, 20, 70)
    lower = x.long().tril()
    want = torch.stack([lower[p::3].sum() for p in range(3)])
    arguments: dict[str, Argument] = {
        "x": x,
        "out": torch.empty_like(want),
        "rows": 20,
        "columns": 70,
    }
    return Run(arguments, {"out": want})


@triton.jit
def table_kernel(table, sizes, scale, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    n = tl.load(sizes + tensor)
    data = tl.load(table + tensor).to(tl.pointer_type(tl.float32))
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(data + at, tl.load(data + at, at < n) * scale, at < n)


@case(
    table_kernel,
    "table: *i64, sizes: *i32, scale: fp32",
    constants={"BLOCK": 128},
    grid=(4,),
)
def tensors_behind_a_table(draw: Draw) -> Run:
    tensors = [draw.reals(size) for size in (1, 300, 0, 128)]
    sizes = torch.tensor([t.numel() for t in tensors], dtype=torch.int32)
    wants = {f"table[{i}]": t * 0.375 for i, t in enumerate(tensors)}
    return Run({"table": tuple(tensors), "sizes": sizes, "scale": 0.375}, dict(wants))
