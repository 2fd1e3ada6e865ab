"""f16 and bf16 arithmetic, scalar and packed.

Sums, products and fused products of 16-bit floats are formed in float64 rounded to odd and then
rounded once to 16 bits, so every result is the correctly rounded one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.floating import extremum
from twinstep.replay.isa.operations import Operation, Table
from twinstep.replay.isa.rounding import bf16_to_f32, f64_to_bf16, fma32_odd, odd_sum

Binary = Callable[..., Array]


def _compute(parts: tuple[str, ...]) -> Binary:
    """The operation on float32 (or float16) values, exact or rounded to odd in float64."""
    family = parts[0]
    if family == "add":
        return lambda a, b: odd_sum(a.astype(np.float64), b.astype(np.float64))
    if family == "sub":
        return lambda a, b: odd_sum(a.astype(np.float64), -b.astype(np.float64))
    if family == "mul":
        return lambda a, b: np.multiply(a, b, dtype=np.float64)
    if family == "fma":
        return fma32_odd
    if family == "abs":
        return np.abs
    if family == "neg":
        return np.negative
    pick = extremum(family == "min", "NaN" in parts)
    if "abs" not in parts:
        return pick

    def signed(a: Array, b: Array) -> Array:
        value = pick(np.abs(a), np.abs(b))
        flip = (np.signbit(a) ^ np.signbit(b)) & ~np.isnan(value)
        return np.where(flip, -value, value)

    return signed


def _modified(parts: tuple[str, ...], function: Binary, tiny: float) -> Binary:
    """Apply `.ftz` (f16 only), `.sat` and `.relu` around the arithmetic."""

    def flushed(x: Array) -> Array:
        return np.where((np.abs(x) < tiny) & (x != 0), np.copysign(x.dtype.type(0), x), x)

    def wrapped(*args: Array) -> Array:
        if "ftz" in parts:
            args = tuple(flushed(a) for a in args)
        value = function(*args)
        if "sat" in parts:
            value = np.where(value > 0, np.minimum(value, 1.0), 0.0)
        if "relu" in parts:
            value = np.where(np.isnan(value), value, np.where(value > 0, value, 0.0))
        return value

    return wrapped


def to_f16_bits(x: Array) -> Array:
    """Round to float16 and return its bits, NaN canonical (0x7fff)."""
    bits = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), bits) if nan.any() else bits


def half_operation(parts: tuple[str, ...]) -> Operation:
    """add, sub, mul, fma, min, max, abs and neg of f16, bf16, f16x2 and bf16x2."""
    kind = parts[-1]
    sources = {"fma": 3, "abs": 1, "neg": 1}.get(parts[0], 2)
    scalar = _signs(parts) if parts[0] in ("abs", "neg") else _scalar(parts, kind)
    function = packed(scalar) if kind.endswith("x2") else scalar
    held = "u32" if kind.endswith("x2") else "u16"
    return Operation(function, (held,) * sources, (held,))


def _signs(parts: tuple[str, ...]) -> Binary:
    def flushed(a: Array) -> Array:
        subnormal = (a & np.uint16(0x7C00)) == 0
        return np.where(subnormal, a & np.uint16(0x8000), a) if "ftz" in parts else a

    if parts[0] == "abs":
        return lambda a: flushed(a) & np.uint16(0x7FFF)
    return lambda a: flushed(a) ^ np.uint16(0x8000)


def _scalar(parts: tuple[str, ...], kind: str) -> Binary:
    """The operation on uint16 bit patterns."""
    brain = kind.startswith("bf16")
    compute = _modified(parts, _compute(parts), 0.0 if brain else 2.0**-14)

    def function(*args: Array) -> Array:
        if brain:
            return f64_to_bf16(compute(*(bf16_to_f32(a) for a in args)).astype(np.float64))
        wide = compute(*(a.view(np.float16).astype(np.float32) for a in args))
        bits = to_f16_bits(wide)
        if "ftz" in parts:
            subnormal = (bits & np.uint16(0x7C00)) == 0
            bits = np.where(subnormal, bits & np.uint16(0x8000), bits)
        return bits

    return function


def packed(scalar: Binary) -> Binary:
    """Apply a function of uint16 patterns to both halves of uint32 words."""

    def function(*args: Array) -> Array:
        low = scalar(*(a.astype(np.uint16) for a in args))
        high = scalar(*((a >> np.uint32(16)).astype(np.uint16) for a in args))
        return (high.astype(np.uint32) << np.uint32(16)) | low

    return function


_BOTH, _BRAIN = "f16,f16x2", "bf16,bf16x2"
FORMS: Table = {
    f"add sub mul: ?rn ?ftz ?sat | {_BOTH}": half_operation,
    f"add sub mul: ?rn | {_BRAIN}": half_operation,
    f"fma: rn ?ftz ?sat | {_BOTH}": half_operation,
    f"fma: rn ?ftz relu | {_BOTH}": half_operation,
    f"fma: rn ?relu | {_BRAIN}": half_operation,
    f"min max: ?ftz ?NaN | {_BOTH}": half_operation,
    f"min max: ?ftz ?NaN xorsign abs | {_BOTH}": half_operation,
    f"min max: ?NaN | {_BRAIN}": half_operation,
    f"min max: ?NaN xorsign abs | {_BRAIN}": half_operation,
    f"abs neg: ?ftz | {_BOTH}": half_operation,
    f"abs neg: | {_BRAIN}": half_operation,
}
