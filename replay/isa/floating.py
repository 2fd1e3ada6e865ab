"""Floating-point arithmetic of f32, f64 and the packed f32x2: one rounding per instruction.

NumPy's + - × / and sqrt are IEEE and round to nearest even; other modes are corrected from the
sign of the exact residual. Subnormals are kept unless the instruction says `.ftz`.
f16 and bf16 are in `half`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.operations import Operation, Table
from twinstep.replay.isa.rounding import (
    cancelled,
    directed,
    flush,
    fma32,
    fma32_odd,
    fma64,
    narrow,
    odd_sum,
    round_fraction_array,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")


def rounding_of(parts: tuple[str, ...]) -> str:
    """The rounding modifier ("rn" where there is none)."""
    return next((part for part in parts if part in ROUNDINGS), "rn")


def finish(
    parts: tuple[str, ...], function: Callable[..., Array], sources: int, charge: str = ""
) -> Operation:
    """Wrap a f32/f64 function with `.ftz`, `.sat` and, for f32x2, packing."""
    kind = parts[-1]
    if "ftz" in parts:
        function = _flushing(function)
    if "sat" in parts:
        function = _saturating(function)
    if kind == "f32x2":
        function, kind = _paired(function), "f32x2"
    return Operation(function, (kind,) * sources, (kind,), kind != "f32x2", charge)


def _flushing(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: flush(function(*(flush(a) for a in args)))


def _saturating(function: Callable[..., Array]) -> Callable[..., Array]:
    def clamped(*args: Array) -> Array:
        value = function(*args)
        kind = value.dtype.type
        return np.asarray(np.where(value > 0, np.minimum(value, kind(1)), kind(0)))

    return clamped


def _paired(function: Callable[..., Array]) -> Callable[..., Array]:
    def both(*args: Array) -> Array:
        low = function(
            *((a & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32) for a in args)
        )
        high = function(*((a >> np.uint64(32)).astype(np.uint32).view(np.float32) for a in args))
        low, high = canonical32(low), canonical32(high)
        return (high.view(np.uint32).astype(np.uint64) << np.uint64(32)) | low.view(np.uint32)

    return both


def canonical32(x: Array) -> Array:
    """Replace every NaN of a float32 array by the canonical 0x7fffffff."""
    nan = np.isnan(x)
    if not np.count_nonzero(nan):
        return x
    return np.where(nan, np.uint32(0x7FFFFFFF), x.view(np.uint32)).view(np.float32)


def canonical(x: Array) -> Array:
    """Canonical NaN of float16 (0x7fff), float32 (0x7fffffff), float64 (quiet, no payload)."""
    if x.dtype == np.float32:
        return canonical32(x)
    nan = np.isnan(x)
    if not np.count_nonzero(nan):
        return x
    if x.dtype == np.float16:
        return np.where(nan, np.uint16(0x7FFF), x.view(np.uint16)).view(np.float16)
    return np.where(nan, np.uint64(0x7FF8 << 48), x.view(np.uint64)).view(np.float64)


def sum_operation(parts: tuple[str, ...]) -> Operation:
    """Add and sub."""
    kind, mode = parts[-1], rounding_of(parts)
    exact = np.add if parts[0] == "add" else np.subtract
    if mode == "rn":
        return finish(parts, exact, 2)

    def function(a: Array, b: Array) -> Array:
        other = b if parts[0] == "add" else -b
        if kind == "f64":
            result = in_exact_rationals(a, other)
        else:
            wide = odd_sum(a.astype(np.float64), other.astype(np.float64))
            result = narrow(wide, np.float32, mode)
        if mode != "rm":
            return result
        return cancelled(result, a == -other, np.signbit(a), np.signbit(other))

    in_exact_rationals = round_fraction_array("add", mode)
    return finish(parts, function, 2)


def _finite(value: Array, residual: Array) -> Array:
    return np.where(np.isfinite(value), residual, 0.0)


def _product(parts: tuple[str, ...]) -> Operation:
    """Mul."""
    kind, mode = parts[-1], rounding_of(parts)
    if mode == "rn":
        return finish(parts, np.multiply, 2)
    if kind == "f64":
        return finish(parts, round_fraction_array("mul", mode), 2)
    return finish(
        parts, lambda a, b: narrow(np.multiply(a, b, dtype=np.float64), np.float32, mode), 2
    )


def fused_operation(parts: tuple[str, ...]) -> Operation:
    """Fma and floating mad (one rounding)."""
    kind, mode = parts[-1], rounding_of(parts)
    if kind == "f64":
        function = fma64 if mode == "rn" else round_fraction_array("fma", mode)
        return finish(parts, function, 3)
    if mode == "rn":
        return finish(parts, fma32, 3)

    def function32(a: Array, b: Array, c: Array) -> Array:
        wide = fma32_odd(a, b, c)
        result = narrow(wide, np.float32, mode)
        if mode != "rm":
            return result
        return cancelled(result, wide == 0, np.signbit(a) ^ np.signbit(b), np.signbit(c))

    return finish(parts, function32, 3)


def _quotient(parts: tuple[str, ...]) -> Operation:
    """div: `.rn` and other modes exact; `.full` and `.approx` correctly rounded and charged."""
    mode = rounding_of(parts)
    charge = next((f"div.{p}.f32" for p in parts if p in ("full", "approx")), "")
    if charge == "div.approx.f32":
        return finish(parts, _quick_quotient, 2, charge)
    if mode == "rn":
        return finish(parts, np.divide, 2, charge)
    if parts[-1] == "f64":
        return finish(parts, round_fraction_array("div", mode), 2)

    def function(a: Array, b: Array) -> Array:
        nearest = a / b
        wide = b.astype(np.float64)
        residual = (a - nearest.astype(np.float64) * wide) * np.sign(wide)
        infinite = np.isinf(nearest) & np.isfinite(a) & (b != 0)
        residual = np.where(infinite, -np.sign(nearest), _finite(nearest, residual))
        return directed(nearest, np.where(np.isfinite(b), residual, 0.0), mode)

    return finish(parts, function, 2)


def _quick_quotient(a: Array, b: Array) -> Array:
    """a·(1/b), whose reciprocal is zero for 2^126 < |b| < 2^128 (PTX ISA, `div`)."""
    zero = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(zero, a * np.copysign(np.float32(0), b), a / b)


def _square_root(parts: tuple[str, ...]) -> Operation:
    mode = rounding_of(parts)
    charge = "sqrt.approx.f32" if "approx" in parts else ""
    if mode == "rn":
        return finish(parts, np.sqrt, 1, charge)
    if parts[-1] == "f64":
        return finish(parts, round_fraction_array("sqrt", mode), 1)

    def function(a: Array) -> Array:
        nearest = np.sqrt(a)
        wide = nearest.astype(np.float64)
        return directed(nearest, _finite(nearest, a - wide * wide), mode)

    return finish(parts, function, 1)


def _reciprocal(parts: tuple[str, ...]) -> Operation:
    divide = _quotient(("div", *(p for p in parts[1:] if p != "approx")))
    charge = f"rcp.approx.{parts[-1]}" if "approx" in parts else ""
    one = np.ones((1, 1), np.float64 if parts[-1] == "f64" else np.float32)
    return Operation(lambda a: divide.function(one, a), (parts[-1],), (parts[-1],), True, charge)


def extremum(smaller: bool, propagate: bool) -> Callable[[Array, Array], Array]:
    """Min or max: a NaN gives way to a number (or wins, with `.NaN`), and -0 < +0."""
    spread = np.minimum if smaller else np.maximum

    def function(a: Array, b: Array) -> Array:
        result = np.asarray(spread(a, b))
        # NumPy's fmin and fmax give a NaN for a signalling one, depending on the memory layout.
        if not propagate and np.count_nonzero(nan := np.isnan(result)):
            result = np.where(nan, np.where(np.isnan(a), b, a), result)
        zeros = (a == 0) & (b == 0)
        if np.count_nonzero(zeros):
            signs = np.signbit(a) | np.signbit(b) if smaller else np.signbit(a) & np.signbit(b)
            kind = result.dtype.type
            result = np.where(zeros, np.where(signs, kind(-0.0), kind(0.0)), result)
        return result

    return function


def _extremum(parts: tuple[str, ...]) -> Operation:
    """Min and max of two (or, on newer targets, three) values."""
    pick = extremum(parts[0] == "min", "NaN" in parts)

    def function(*args: Array) -> Array:
        if "abs" in parts:
            sign = np.signbit(args[0]) ^ np.signbit(args[1])
            value = pick(np.abs(args[0]), np.abs(args[1]))
            return np.where(sign & ~np.isnan(value), -value, value)
        result = args[0]
        for other in args[1:]:
            result = pick(result, other)
        return result

    return replace(finish(parts, function, 2), variadic=True)


def _sign(parts: tuple[str, ...]) -> Operation:
    """Abs and neg: the sign bit, nothing else."""
    return finish(parts, np.abs if parts[0] == "abs" else np.negative, 1)


def _copy_sign(parts: tuple[str, ...]) -> Operation:
    return Operation(lambda a, b: np.copysign(b, a), (parts[-1],) * 2, (parts[-1],))


FORMS: Table = {
    "add sub: ?$round ?ftz ?sat | f32": sum_operation,
    "add sub: ?$round ?ftz | f32x2": sum_operation,
    "add sub: ?$round | f64": sum_operation,
    "mul: ?$round ?ftz ?sat | f32": _product,
    "mul: ?$round ?ftz | f32x2": _product,
    "mul: ?$round | f64": _product,
    "fma mad: $round ?ftz ?sat | f32": fused_operation,
    "fma: $round ?ftz | f32x2": fused_operation,
    "fma mad: $round | f64": fused_operation,
    "div: $round ?ftz | f32": _quotient,
    "div: approx,full ?ftz | f32": _quotient,
    "div: $round | f64": _quotient,
    "rcp: $round,approx ?ftz | f32": _reciprocal,
    "rcp: $round | f64": _reciprocal,
    "sqrt: $round,approx ?ftz | f32": _square_root,
    "sqrt: $round | f64": _square_root,
    "min max: ?ftz ?NaN | f32": _extremum,
    "min max: ?ftz ?NaN xorsign abs | f32": _extremum,
    "min max: | f64": _extremum,
    "abs neg: ?ftz | f32": _sign,
    "abs neg: | f64": _sign,
    "copysign: | f32,f64": _copy_sign,
}
