"""Division, roots, transcendental functions, float64."""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from twinstep.replay.corpus.case import Draw, Near, Run, case, rounded


@triton.jit
def divide_kernel(x, y, quotient, root, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n, other=1.0)
    b = tl.load(y + at, at < n, other=1.0)
    tl.store(quotient + at, tl.div_rn(a, b), at < n)
    tl.store(root + at, tl.sqrt_rn(a), at < n)


@case(
    divide_kernel,
    "x: *fp32, y: *fp32, quotient: *fp32, root: *fp32, n: i32",
    constants={"BLOCK": 256},
    grid=(2,),
)
def exact_division_and_root(draw: Draw) -> Run:
    """float64 carries a quotient and a root of fp32 numbers far enough for one more rounding."""
    x, y = draw.patterns(400, dtype=torch.float32), draw.patterns(400, dtype=torch.float32)
    x[200:] = x[200:].abs()
    wants = {"quotient": (x.double() / y.double()).float(), "root": x.double().sqrt().float()}
    empty = {name: torch.empty(400) for name in wants}
    return Run({"x": x, "y": y, **empty, "n": 400}, dict(wants))


@triton.jit
def fast_kernel(x, e, l, r, s, q, n, BLOCK: tl.constexpr):  # noqa: E741
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=1.0)
    tl.store(e + at, tl.exp(-v), at < n)
    tl.store(l + at, tl.log2(v), at < n)
    tl.store(r + at, tl.rsqrt(v), at < n)
    tl.store(s + at, tl.sqrt(v), at < n)
    tl.store(q + at, 1.0 / (1.0 + v), at < n)


@case(
    fast_kernel,
    "x: *fp32, e: *fp32, l: *fp32, r: *fp32, s: *fp32, q: *fp32, n: i32",
    constants={"BLOCK": 256},
    grid=(2,),
)
def approximate_functions(draw: Draw) -> Run:
    x = draw.reals(300, low=0.01, high=9.0)
    v = x.double()
    e = (-v).exp()
    # An absolute error of the exponent is a relative one of the power.
    reason = "the exponent x/ln 2 is rounded twice, ex2.approx: 2 ULP"
    exponent = (v / math.log(2) + 2).abs()
    wants = {
        "e": Near(e, e * (exponent + 3) * 2.0**-23, reason),
        "l": rounded(v.log2(), 4, "the library's log2: 2 ULP, and 2^-22 near 1", floor=2.0**-22),
        "r": rounded(v.rsqrt(), 8, "rsqrt.approx: 2^-22.4 relative"),
        "s": rounded(v.sqrt(), 4, "sqrt.approx or rn: 1 ULP"),
        "q": rounded(1 / (1 + v), 7, "one addition, div.full: 2 ULP"),
    }
    empty = {name: torch.empty(300) for name in wants}
    return Run({"x": x, **empty, "n": 300}, dict(wants))


@triton.jit
def waves_kernel(x, s, c, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0.0)
    tl.store(s + at, libdevice.sin(v), at < n)
    tl.store(c + at, libdevice.cos(v), at < n)


@case(
    waves_kernel,
    "x: *fp32, s: *fp32, c: *fp32, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
)
def reduced_sine(draw: Draw) -> Run:
    """Large arguments take a slow path through an array in local memory, thread by thread."""
    x = draw.reals(200, low=-300.0, high=300.0)
    x[::3] *= 1e6
    why = "the library's sine and cosine: 2 ULP of 1"
    error = torch.full((200,), 2.0**-22, dtype=torch.float64)
    wants = {"s": Near(x.double().sin(), error, why), "c": Near(x.double().cos(), error, why)}
    return Run({"x": x, "s": torch.empty(200), "c": torch.empty(200), "n": 200}, dict(wants))


@triton.jit
def gelu_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0.0)
    tl.store(out + at, 0.5 * v * (1 + tl.math.erf(v * 0.7071067811865476)), at < n)


@case(gelu_kernel, "x: *fp32, out: *fp32, n: i32", constants={"BLOCK": 256}, grid=(2,))
def gelu(draw: Draw) -> Run:
    x = draw.reals(300)
    v = x.double()
    values = 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))
    why = "erf 2 ULP of 1, four roundings, all of at most |x|"
    return Run(
        {"x": x, "out": torch.empty(300), "n": 300},
        {"out": Near(values, v.abs() * 8 * 2.0**-24 + 2.0**-140, why)},
    )


@triton.jit
def double_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, at < n, other=1.0)
    b = tl.load(y + at, at < n, other=1.0)
    tl.store(out + at, a / b + tl.sqrt(tl.abs(a)), at < n)
    tl.store(out + n + at, (a * b) - a, at < n)


@case(
    double_kernel,
    "x: *fp64, y: *fp64, out: *fp64, n: i32",
    constants={"BLOCK": 128},
    grid=(2,),
    fused=False,
)
def float64_arithmetic(draw: Draw) -> Run:
    x, y = draw.doubles(200), draw.doubles(200)
    a, b = x.numpy(), y.numpy()
    want = torch.tensor(np.concatenate([a / b + np.sqrt(np.abs(a)), a * b - a]))
    return Run({"x": x, "y": y, "out": torch.empty_like(want), "n": 200}, {"out": want})


@triton.jit
def horner_kernel(x, out, n, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=1.0)
    total = tl.zeros((BLOCK,), tl.float64) + 1.0
    for power in range(DEGREE):
        total = total * v + power
    tl.store(out + at, total, at < n)


@case(
    horner_kernel,
    "x: *fp64, out: *fp64, n: i32",
    constants={"DEGREE": 6, "BLOCK": 128},
    grid=(2,),
)
def float64_polynomial(draw: Draw) -> Run:
    """Small integers: every intermediate value is exact, contracted or not."""
    x = draw.integers(-50, 50, 200, dtype=torch.float64)
    want = torch.ones_like(x)
    for power in range(6):
        want = want * x + power
    return Run({"x": x, "out": torch.empty_like(x), "n": 200}, {"out": want})
