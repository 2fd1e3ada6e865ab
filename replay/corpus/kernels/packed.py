"""Packed arithmetic and single instructions that Triton reaches through inline assembly."""

import numpy as np
import torch
import triton
import triton.language as tl

from twinstep.replay.corpus.case import Draw, Run, case


@triton.jit
def half_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    v = tl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.f16x2 t, $1, $2; add.rn.f16x2 $0, t, $1; }",
        "=r,r,r",
        [a, b],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
    tl.store(out + at, v)


@case(half_kernel, "x: *fp16, y: *fp16, out: *fp16", constants={"BLOCK": 256}, grid=(2,))
def packed_fp16(draw: Draw) -> Run:
    """NumPy's halves: each operation is done in fp32 and rounded, which is one rounding of two."""
    x, y = draw.reals(512).half(), draw.reals(512).half()
    want = torch.from_numpy(x.numpy() * y.numpy() + x.numpy())
    return Run({"x": x, "y": y, "out": torch.empty_like(x)}, {"out": want})


@triton.jit
def brain_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    v = tl.inline_asm_elementwise(
        "{ .reg .b32 t; fma.rn.bf16x2 t, $1, $2, $1; max.bf16x2 $0, t, $2; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
    tl.store(out + at, v)


@case(brain_kernel, "x: *bf16, y: *bf16, out: *bf16", constants={"BLOCK": 256}, grid=(2,))
def packed_bf16(draw: Draw) -> Run:
    """Products of 16 bits plus 8 bits of like size fit float64; fp32 holds what bf16 rounds."""
    x, y = draw.integers(-99, 99, 512).bfloat16() / 8, draw.integers(-99, 99, 512).bfloat16() / 4
    fused = (x.double() * y.double() + x.double()).float().bfloat16()
    return Run({"x": x, "y": y, "out": torch.empty_like(x)}, {"out": torch.maximum(fused, y)})


@triton.jit
def pair_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    v = tl.inline_asm_elementwise(
        "{ .reg .b64 a, b, t; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5};"
        " mul.rn.f32x2 t, a, b; add.rn.f32x2 t, t, a; mov.b64 {$0, $1}, t; }",
        "=r,=r,r,r,r,r",
        [a, b],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
    tl.store(out + at, v)


@case(
    pair_kernel,
    "x: *fp32, y: *fp32, out: *fp32",
    constants={"BLOCK": 256},
    grid=(2,),
    sms=(100,),
)
def packed_fp32(draw: Draw) -> Run:
    x, y = draw.reals(512), draw.reals(512)
    return Run({"x": x, "y": y, "out": torch.empty_like(x)}, {"out": x * y + x})


@triton.jit
def byte_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    v = tl.inline_asm_elementwise(
        "{ .reg .b32 s, t, u; dp4a.s32.s32 s, $1, $2, 7; prmt.b32 t, $1, $2, 0x3715;"
        " bfe.u32 u, $1, 5, 11; lop3.b32 t, t, u, $2, 0xCA; add.s32 $0, s, t; }",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    tl.store(out + at, v)


@case(byte_kernel, "x: *i32, y: *i32, out: *i32", constants={"BLOCK": 128}, grid=(2,))
def bytes_of_words(draw: Draw) -> Run:
    x, y = draw.integers(-(2**31), 2**31, 256), draw.integers(-(2**31), 2**31, 256)
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    want = np.array([by_bytes(a, b) for a, b in pairs], np.uint32).view(np.int32)
    return Run({"x": x, "y": y, "out": torch.empty_like(x)}, {"out": torch.tensor(want)})


def by_bytes(a: int, b: int) -> int:
    """Result of `byte_kernel`, byte by byte."""
    low, high = a.to_bytes(4, "little", signed=True), b.to_bytes(4, "little", signed=True)
    dot = 7 + sum(
        int.from_bytes(low[i : i + 1], signed=True) * int.from_bytes(high[i : i + 1], signed=True)
        for i in range(4)
    )
    both = low + high
    chosen = int.from_bytes(bytes(both[i] for i in (5, 1, 7, 3)), "little")
    field = a >> 5 & 0x7FF
    word = (chosen & field) | (~chosen & (b & 0xFFFFFFFF))
    return (dot + word) % 2**32


@triton.jit
def narrow_math_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(a > b, a * b, a - b))


@case(
    narrow_math_kernel,
    "x: *fp16, y: *fp16, out: *fp16",
    constants={"BLOCK": 256},
    grid=(2,),
)
def arithmetic_in_fp16(draw: Draw) -> Run:
    x, y = draw.patterns(512, dtype=torch.float16), draw.patterns(512, dtype=torch.float16)
    a, b = x.float(), y.float()
    return Run(
        {"x": x, "y": y, "out": torch.empty_like(x)},
        {"out": torch.where(a > b, a * b, a - b).half()},
    )


@case(
    narrow_math_kernel,
    "x: *bf16, y: *bf16, out: *bf16",
    constants={"BLOCK": 256},
    grid=(2,),
)
def arithmetic_in_bf16(draw: Draw) -> Run:
    """fp32 has more than twice the bits of bf16, so rounding twice is rounding once."""
    x, y = draw.patterns(512, dtype=torch.bfloat16), draw.patterns(512, dtype=torch.bfloat16)
    a, b = x.float(), y.float()
    return Run(
        {"x": x, "y": y, "out": torch.empty_like(x)},
        {"out": torch.where(a > b, a * b, a - b).bfloat16()},
    )
