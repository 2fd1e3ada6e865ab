"""cvt: every direction between integers and floats, with rounding, saturation and packing.

Out-of-range floats saturate when they become integers. NaN becomes 0, except from f64 or to a
64-bit integer, where it becomes the sign-bit pattern (PTX ISA, `cvt`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array
from twinstep.replay.isa.operations import Operation, Table
from twinstep.replay.isa.rounding import (
    bf16_to_f32,
    directed,
    f32_to_bf16,
    f64_to_bf16,
    flush,
    narrow,
)

_FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
_MODES = frozenset({"rn", "rz", "rm", "rp", "rna"})
_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_LARGEST = {"f16": 65504.0, "bf16": (2 - 2.0**-7) * 2.0**127, "tf32": (2 - 2.0**-10) * 2.0**127}
_FLAGS = frozenset({"ftz", "sat", "satfinite", "relu"})


def read_float(kind: str) -> Callable[[Array], Array]:
    """Bits of a register to a NumPy float array (bf16 widens to float32)."""
    return bf16_to_f32 if kind == "bf16" else lambda a: a


def write_float(kind: str, mode: str) -> Callable[[Array], Array]:
    """A float32 or float64 array, rounded once to a format (bf16 as bits)."""
    if kind == "bf16":
        return lambda x: (
            f64_to_bf16(x, mode) if x.dtype == np.float64 else f32_to_bf16(x.astype("f4"), mode)
        )
    dtype = NUMPY[kind].type
    if mode == "rn":
        return lambda x: x.astype(dtype)
    return lambda x: narrow(x, dtype, mode)


def limited(flags: frozenset[str], kind: str) -> Callable[[Array], Array]:
    """`.relu`, `.sat` and `.satfinite` on the value before rounding."""
    largest = _LARGEST.get(kind, float("inf"))

    def limit(x: Array) -> Array:
        if "relu" in flags:
            x = np.where(np.isnan(x), x, np.where(x > 0, x, x.dtype.type(0)))
        if "sat" in flags:
            x = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))
        if "satfinite" in flags:
            x = np.where(np.isnan(x), x, np.clip(x, -largest, largest)).astype(x.dtype)
        return x

    return limit if flags & {"relu", "sat", "satfinite"} else lambda x: x


def float_to_integer(kind: str, source: str, rounding: str) -> Callable[[Array], Array]:
    """A float array to an integer type: round, saturate, NaN as the ISA says."""
    dtype = NUMPY[kind]
    info = np.iinfo(dtype)
    wide = source == "f64" or dtype.itemsize == 8
    nan_value = (1 << (8 * dtype.itemsize - 1)) if wide else 0
    nan = np.array(nan_value, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)

    def function(x: Array) -> Array:
        whole = _INTEGRAL[rounding](x.astype(np.float64))
        low, high = whole < float(info.min), whole >= float(info.max) + (info.max < 2**53)
        bad = np.isnan(whole)
        safe = np.where(low | high | bad, 0.0, whole).astype(dtype)
        result = np.where(low, dtype.type(info.min), np.where(high, dtype.type(info.max), safe))
        return np.where(bad, nan, result)

    return function


def integer_to_float(kind: str, mode: str) -> Callable[[Array], Array]:
    """An integer array to a float format in any rounding mode."""

    def function(a: Array) -> Array:
        if a.dtype.itemsize < 8:
            return write_float(kind, mode)(a.astype(np.float64))
        nearest = a.astype(np.float64 if kind == "f64" else np.float32)
        if kind in ("f16", "bf16"):
            return write_float(kind, mode)(_odd_float64(a))
        gap = a.astype(np.longdouble) - nearest.astype(np.longdouble)
        return directed(nearest, np.sign(gap).astype(np.float64), mode)

    return function


def _odd_float64(a: Array) -> Array:
    nearest = a.astype(np.float64)
    gap = np.sign(a.astype(np.longdouble) - nearest.astype(np.longdouble)).astype(np.float64)
    bits = directed(nearest, gap, "rz").view(np.uint64).copy()
    bits[gap != 0] |= np.uint64(1)
    return bits.view(np.float64)


def integer_to_integer(kind: str, saturate: bool) -> Callable[[Array], Array]:
    """Truncate, extend, or clamp with `.sat`."""
    dtype = NUMPY[kind]
    if not saturate:
        return lambda a: a.astype(dtype)
    info = np.iinfo(dtype)

    def clamp(a: Array) -> Array:
        own = np.iinfo(a.dtype)
        return np.clip(a, max(info.min, own.min), min(info.max, own.max)).astype(dtype)

    return clamp


def _convert(parts: tuple[str, ...]) -> Operation:
    target, source = parts[-2], parts[-1]
    modifiers = frozenset(parts[1:-2])
    function = _direction(target, source, _mode(parts), modifiers)
    return Operation(function, (source,), (target,), target in _FLOATS)


def _mode(parts: tuple[str, ...]) -> str:
    return next((part for part in parts if part in _MODES), "rn")


def _direction(
    target: str, source: str, mode: str, modifiers: frozenset[str]
) -> Callable[[Array], Array]:
    if target not in _FLOATS:
        if source not in _FLOATS:
            return integer_to_integer(target, "sat" in modifiers)
        rounding = next(iter(modifiers & _INTEGRAL.keys()), "rzi")
        convert = float_to_integer(target, source, rounding)
        read = read_float(source)
        ftz = "ftz" in modifiers and source == "f32"
        return lambda a: convert(flush(read(a)) if ftz else read(a))
    if source not in _FLOATS:
        to_float = integer_to_float(target, mode)
        return (lambda a: to_float(np.clip(a, 0, 1))) if "sat" in modifiers else to_float
    return _float_to_float(target, source, mode, modifiers)


def _float_to_float(
    target: str, source: str, mode: str, modifiers: frozenset[str]
) -> Callable[[Array], Array]:
    read, write = read_float(source), write_float(target, mode)
    limit = limited(modifiers & _FLAGS, target)
    integral = next((_INTEGRAL[m] for m in modifiers & _INTEGRAL.keys()), None)
    if source == "bf16" and target == "f32" and not modifiers:
        return bf16_to_f32

    def function(a: Array) -> Array:
        x = read(a)
        if "ftz" in modifiers and x.dtype == np.float32:
            x = flush(x)
        if integral is not None:
            x = integral(x)
        y = write(limit(x))
        return flush(y) if "ftz" in modifiers and target == "f32" else y

    return function


def _pack(parts: tuple[str, ...]) -> Operation:
    """cvt.f16x2/bf16x2.f32 d, a, b: a to the upper half, b to the lower."""
    scalar = parts[-2][:-2]
    write, limit = write_float(scalar, _mode(parts)), limited(frozenset(parts), scalar)

    def bits(x: Array) -> Array:
        y = write(limit(x)).view(np.uint16)
        nan = np.isnan(x)
        return np.where(nan, np.uint16(0x7FFF), y) if nan.any() else y

    def function(a: Array, b: Array) -> Array:
        return (bits(a).astype(np.uint32) << np.uint32(16)) | bits(b)

    return Operation(function, ("f32", "f32"), ("u32",))


def _to_tf32(parts: tuple[str, ...]) -> Operation:
    mode, limit = _mode(parts), limited(frozenset(parts), "tf32")

    def function(x: Array) -> Array:
        x = limit(x)
        bits = x.view(np.uint32)
        if mode == "rna":
            rounded = bits + np.uint32(0x1000)
        elif mode == "rn":
            rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        else:
            rounded = bits
        kept = rounded & np.uint32(0xFFFFE000)
        return np.where(np.isfinite(x), kept, np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits))

    return Operation(function, ("f32",), ("u32",))


FORMS: Table = {
    "cvt: | $all $all": _convert,
    "cvt: sat | u8 s8,u16,s16,u32,s32,u64,s64": _convert,
    "cvt: sat | s8 u8,u16,s16,u32,s32,u64,s64": _convert,
    "cvt: sat | u16 s8,s16,u32,s32,u64,s64": _convert,
    "cvt: sat | s16 u16,u32,s32,u64,s64": _convert,
    "cvt: sat | u32 s8,s16,s32,u64,s64": _convert,
    "cvt: sat | s32 u32,u64,s64": _convert,
    "cvt: sat | u64 s8,s16,s32,s64": _convert,
    "cvt: sat | s64 u64": _convert,
    "cvt: $round ?ftz ?sat | f32 $all": _convert,
    "cvt: $round ?sat | f64 $all": _convert,
    "cvt: $round ?sat | f16 $all": _convert,
    "cvt: $round | bf16 $int": _convert,
    "cvt: $whole ?sat | $all f16,f64": _convert,
    "cvt: $whole ?ftz ?sat | $all f32": _convert,
    "cvt: $whole | $int bf16": _convert,
    "cvt: ?ftz ?sat | f32 f16": _convert,
    "cvt: ?sat | f64 f16": _convert,
    "cvt: ?ftz ?sat | f64,f32 f32": _convert,
    "cvt: ?sat | f64 f64": _convert,
    "cvt: ?sat | f16 f16": _convert,
    "cvt: ?$round ?ftz | f32 bf16": _convert,
    "cvt: ?$round | f64 bf16": _convert,
    "cvt: ?$whole | bf16 bf16": _convert,
    "cvt: $whole ?sat | f16 f16": _convert,
    "cvt: $whole ?ftz ?sat | f32 f32": _convert,
    "cvt: $whole ?sat | f64 f64": _convert,
    "cvt: $round ?ftz ?sat | f32 f64": _convert,
    "cvt: $round ?ftz ?sat | f16 f32": _convert,
    "cvt: $round ?sat | f16 f64": _convert,
    "cvt: rn,rz ?satfinite ?relu | f16,bf16 f32": _convert,
    "cvt: $round ?ftz | bf16 f32": _convert,
    "cvt: rn,rz ?satfinite ?relu | f16x2,bf16x2 f32": _pack,
    "cvt: $round | bf16 f64": _convert,
    "cvt: ?$round | bf16 f16": _convert,
    "cvt: ?$round | f16 bf16": _convert,
    "cvt: rn,rz ?relu | tf32 f32": _to_tf32,
    "cvt: rna ?satfinite | tf32 f32": _to_tf32,
}
