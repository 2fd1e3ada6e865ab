"""One small kernel for each construct: three inputs, one output, one block of elements.

Masks are full unless the construct is about them. No kernel guards itself against what it shows.
"""

import triton
import triton.language as tl


@triton.jit
def cast(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i).to(out.dtype.element_ty))


@triton.jit
def add(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i) + tl.load(b + i))


@triton.jit
def multiply_add(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i) * tl.load(b + i) + tl.load(c + i))


@triton.jit
def fma(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


@triton.jit
def divide(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i) / tl.load(b + i))


@triton.jit
def divide_rn(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.div_rn(tl.load(a + i), tl.load(b + i)))


@triton.jit
def root(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.sqrt(tl.load(a + i)))


@triton.jit
def root_rn(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.sqrt_rn(tl.load(a + i)))


@triton.jit
def inverse_root(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.rsqrt(tl.load(a + i)))


@triton.jit
def power_of_two(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.exp2(tl.load(a + i)))


@triton.jit
def greatest(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.maximum(tl.load(a + i), tl.load(b + i)))


@triton.jit
def greatest_of_all(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.max(tl.load(a + i), axis=0) + tl.zeros([BLOCK], tl.float32))


@triton.jit
def scalar_minus(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, (1.0 - n) * tl.load(a + i))


@triton.jit
def masked(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i, mask=i < n))


@triton.jit
def atomic_sum(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i * 0, tl.load(a + i))


@triton.jit
def beyond(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i + n, tl.load(a + i))


@triton.jit
def neighbour(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.program_id(0).to(tl.float32) + tl.load(a + i))


@triton.jit
def inline(a, b, c, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(a + i)
    y = tl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, 0f3F800000;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + i, y)
