"""Correct rounding where NumPy has none: fused multiply-add, directed modes, bfloat16.

The tool throughout is *round to odd*: a value rounded toward zero whose last bit is set when
anything was lost. With at least two spare bits it can be rounded again to any mode and narrower
format with the result of a single rounding. All functions take and return arrays, never raise,
keep subnormals, and let NaN through (payload unspecified; callers canonicalise).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isfinite, isinf, ldexp

import numpy as np

from twinstep.replay.dtypes import Array

_F64_SPLIT = np.float64(134217729.0)  # 2**27 + 1
_TIE32 = np.uint64(1 << 28)
_LOW29 = np.uint64((1 << 29) - 1)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """A + b = s + e exactly, s = RN(a + b), for finite float64 without overflow."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def odd_sum(a: Array, b: Array) -> Array:
    """A + b in float64 rounded to odd (finite sums; infinities and NaN as IEEE)."""
    a, b = np.broadcast_arrays(a, b)
    s, e = two_sum(a, b)
    return to_odd(s, e)


def to_odd(s: Array, e: Array) -> Array:
    """Turn s = RN(x), e = x - s into x rounded to odd."""
    bits = s.view(np.uint64).copy()
    even = (bits & np.uint64(1)) == 0
    fix = (e != 0) & np.isfinite(s) & np.isfinite(e) & even
    if fix.any():
        # Away from zero when the lost part has the sign of s, else toward zero: an even last
        # bit becomes odd either way.
        away = (e > 0) == (s > 0)
        step = np.where(away, np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF))
        bits[fix] += step[fix]
    return bits.view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32: a·b + c with one rounding. The product of two float32 is exact in float64."""
    product = np.multiply(a, b, dtype=np.float64)
    addend = c.astype(np.float64)
    s = product + addend
    rounded = s.astype(np.float32)
    bits = s.view(np.uint64)
    # The second rounding can only go wrong at a float32 midpoint, or below the normal range.
    risky = ((bits & _LOW29) == _TIE32) | (np.abs(s) < 2.0**-125)
    if risky.any():
        shape = s.shape
        p, c64 = np.broadcast_to(product, shape)[risky], np.broadcast_to(addend, shape)[risky]
        fixed = odd_sum(p, c64).astype(np.float32)
        rounded[risky] = np.where(s[risky] == 0, s[risky].astype(np.float32), fixed)
    return rounded


def fma32_odd(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of float32 (or float16) values as float64 rounded to odd."""
    return odd_sum(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))


def fma64(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f64 by error-free transforms; lanes near the range's ends in exact rationals."""
    a, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c))
    p = a * b
    pe = _product_error(a, b, p)
    s1, e1 = two_sum(pe, c)
    s2, e2 = two_sum(p, s1)
    # Boldo and Melquiond: the two small terms, added to odd, then one final rounding.
    result = np.asarray(s2 + odd_sum(e2, e1))
    largest = np.maximum(np.abs(p), np.abs(c))
    tame = (
        (largest < 2.0**1000)
        & (np.maximum(np.abs(a), np.abs(b)) < 2.0**990)
        & (np.abs(p) > 2.0**-900)
        & ((np.abs(c) > 2.0**-900) | (c == 0))
        & ((np.abs(result) > 2.0**-900) | (result == 0))
    )
    zero = (a == 0) | (b == 0)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    result = np.where(zero | ~finite, _plain(a, b, c, finite), result)
    wild = ~tame & ~zero & finite
    if wild.any():
        result[wild] = [
            _fma_exact(float(x), float(y), float(z))
            for x, y, z in zip(a[wild], b[wild], c[wild], strict=True)
        ]
    return result


def _plain(a: Array, b: Array, c: Array, finite: Array) -> Array:
    """The value for a zero factor, or for operands that are not all finite."""
    product = np.where(finite, a * b, 0.0)
    # An infinite addend must not meet a product that overflowed to the other infinity.
    clipped = np.where(np.isfinite(a) & np.isfinite(b), np.sign(a) * np.sign(b), a * b)
    return np.asarray(np.where(finite, product, clipped) + c)


def _product_error(a: Array, b: Array, p: Array) -> Array:
    """a·b - p exactly (Dekker), for magnitudes away from the ends of the range."""

    def split(x: Array) -> tuple[Array, Array]:
        t = _F64_SPLIT * x
        high = t - (t - x)
        return high, x - high

    ah, al = split(a)
    bh, bl = split(b)
    return np.asarray(((ah * bh - p) + ah * bl + al * bh) + al * bl)


def _fma_exact(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    return round_fraction(exact)


def round_fraction(exact: Fraction, digits: int = 53, least: int = -1074) -> float:
    """The float nearest to a rational (ties to even) with so many bits and least exponent."""
    sign, exact = (-1.0, -exact) if exact < 0 else (1.0, exact)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if exact < Fraction(2) ** exponent:
        exponent -= 1
    unit = max(exponent - digits + 1, least)
    count = round(exact / Fraction(2) ** unit)
    try:
        return sign * ldexp(count, unit)
    except OverflowError:
        return sign * float("inf")


def directed(nearest: Array, residual: Array, mode: str) -> Array:
    """Correct a result rounded to nearest to mode rz, rm or rp.

    Args:
        nearest: RN(x) in the destination format.
        residual: Any array with the sign of x - nearest.
        mode: "rn" returns `nearest`; "rz" toward zero, "rm" down, "rp" up.
    """
    if mode == "rn":
        return nearest
    down = np.asarray(residual < 0)
    up = np.asarray(residual > 0)
    if mode == "rz":
        negative = np.signbit(nearest)
        down, up = down & ~negative, up & negative
    elif mode == "rm":
        up = np.zeros_like(up)
    else:
        down = np.zeros_like(down)
    kind = nearest.dtype.type
    lower = np.nextafter(nearest, kind(-np.inf))
    upper = np.nextafter(nearest, kind(np.inf))
    return np.where(down, lower, np.where(up, upper, nearest))


def narrow(x: Array, kind: type[np.floating], mode: str = "rn") -> Array:
    """A float64 or float32 array to a narrower format in any rounding mode."""
    nearest = x.astype(kind)
    if mode == "rn":
        return nearest
    wide = nearest.astype(np.float64)
    exact = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        residual = np.where(np.isinf(exact), 0.0, np.where(np.isinf(wide), -wide, exact - wide))
    return directed(nearest, residual, mode)


def f32_to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 to bfloat16 bits (uint16) in any rounding mode; NaN becomes 0x7fff."""
    bits = x.view(np.uint32)
    if mode == "rn":
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> (
            np.uint32(16)
        )
    elif mode == "rz":
        rounded = bits >> np.uint32(16)
    else:
        away = np.signbit(x) == (mode == "rm")
        rounded = (bits + np.where(away, np.uint32(0xFFFF), np.uint32(0))) >> np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), result) if nan.any() else result


def bf16_to_f32(bits: Array) -> Array:
    """bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f64_to_f32_odd(x: Array) -> Array:
    """float64 to float32 rounded to odd, so that a second rounding to 16 bits is safe."""
    nearest = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        residual = x - nearest.astype(np.float64)
    truncated = directed(nearest, np.where(np.isfinite(x), residual, 0.0), "rz")
    bits = truncated.view(np.uint32).copy()
    lost = (truncated.astype(np.float64) != x) & np.isfinite(x)
    bits[lost] |= np.uint32(1)
    return bits.view(np.float32)


def f64_to_bf16(x: Array, mode: str = "rn") -> Array:
    """float64 to bfloat16 bits with a single rounding."""
    return f32_to_bf16(f64_to_f32_odd(x), mode)


def flush(x: Array) -> Array:
    """`.ftz`: subnormals of the array's format become zero of the same sign."""
    kind = x.dtype.type
    tiny = (np.abs(x) < np.finfo(kind).smallest_normal) & (x != 0)
    return np.where(tiny, np.copysign(kind(0), x), x) if tiny.any() else x


def cancelled(result: Array, exact_zero: Array, a: Array, b: Array) -> Array:
    """Rounding down, an exact zero sum of terms of opposite signs (given as flags) is -0."""
    return np.where(exact_zero & (a != b), np.copysign(result, result.dtype.type(-1)), result)


def round_fraction_array(what: str, mode: str) -> Callable[..., Array]:
    """float64 add, mul, div, sqrt or fma in a directed mode: nearest result, exact residual sign.

    Args:
        what: "add", "mul", "div", "sqrt" or "fma".
        mode: "rz", "rm" or "rp".
    """

    def function(*args: Array) -> Array:
        arrays = np.broadcast_arrays(*args)
        nearest = np.asarray(_NEAREST64[what](*arrays))
        lanes = zip(nearest.flat, *(a.flat for a in arrays), strict=True)
        signs = [_residual_sign(what, *(float(v) for v in lane)) for lane in lanes]
        residual = np.array(signs, np.float64).reshape(nearest.shape)
        result = directed(nearest, residual, mode)
        if what == "fma" and mode == "rm":
            exact_zero = (nearest == 0) & (residual == 0)
            return cancelled(
                result,
                exact_zero,
                np.signbit(arrays[0]) ^ np.signbit(arrays[1]),
                np.signbit(arrays[2]),
            )
        return result

    return function


def _residual_sign(what: str, result: float, *args: float) -> int:
    """The sign of the exact value minus `result`; 0 where the result is special."""
    if not all(isfinite(a) for a in args) or result != result:
        return 0
    if isinf(result):
        return 0 if what == "div" and args[1] == 0 else (-1 if result > 0 else 1)
    exact = [Fraction(a) for a in args]
    got = Fraction(result)
    if what == "add":
        gap = exact[0] + exact[1] - got
    elif what == "mul":
        gap = exact[0] * exact[1] - got
    elif what == "fma":
        gap = exact[0] * exact[1] + exact[2] - got
    elif what == "div":
        gap = (exact[0] - got * exact[1]) * (1 if exact[1] > 0 else -1)
    else:
        gap = exact[0] - got * got
    return (gap > 0) - (gap < 0)


_NEAREST64: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
    "fma": fma64,
}
