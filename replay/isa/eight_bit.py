"""cvt between the 8-bit floats e4m3, e5m2 and fp16 or fp32, always in pairs.

e4m3 has no infinity, and its largest pattern of either sign is its only NaN. Conversions to 8 bits
round to nearest even and saturate: what is too large, infinity included, becomes the largest finite
number. NaN stays NaN and loses sign and payload (PTX ISA, `cvt`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.operations import Operation, Table

_FRACTION = {"e4m3": 3, "e5m2": 2}
_BIAS = {"e4m3": 7, "e5m2": 15}
_LARGEST = {"e4m3": np.uint8(0x7E), "e5m2": np.uint8(0x7B)}
_NAN = np.uint8(0x7F)
_LARGEST_FP32 = np.finfo(np.float32).max


def _narrowed(kind: str, relu: bool) -> Callable[[Array], Array]:
    """Float32 values to 8-bit patterns."""
    fraction, bias, largest = _FRACTION[kind], _BIAS[kind], _LARGEST[kind]

    def function(x: Array) -> Array:
        size = np.minimum(np.abs(x), _LARGEST_FP32)
        binade = np.maximum(
            (size.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127, 1 - bias
        )
        # A power of two scales without rounding; a carry moves to the next binade by itself.
        whole = np.rint(np.ldexp(size, fraction - binade))
        pattern = whole.astype(np.int64) + ((binade + (bias - 1)).astype(np.int64) << fraction)
        bits = np.minimum(pattern, largest).astype(np.uint8)
        negative = np.signbit(x)
        bits = np.where(negative, np.uint8(0) if relu else bits | np.uint8(0x80), bits)
        return np.where(np.isnan(x), _NAN, bits)

    return function


def _table(kind: str, relu: bool) -> Array:
    """The float16 patterns of all 256 patterns of 8 bits."""
    bits = np.arange(256)
    fraction, bias = _FRACTION[kind], _BIAS[kind]
    binade, rest = (bits & 0x7F) >> fraction, bits & ((1 << fraction) - 1)
    whole = np.where(binade == 0, rest, rest | 1 << fraction)
    size = np.ldexp(whole.astype(np.float32), np.maximum(binade, 1) - bias - fraction)
    infinity = 0x7C if kind == "e5m2" else 0x7F
    size[(bits & 0x7F) >= infinity] = np.inf
    value = np.where(bits >= 0x80, 0.0 if relu else -size, size).astype(np.float16)
    nan = (bits & 0x7F) > _LARGEST[kind] + (kind == "e5m2")
    return np.where(nan, np.uint16(0x7FFF), value.view(np.uint16))


def _halves(a: Array) -> tuple[Array, Array]:
    """The upper and the lower float16 of a pair, as float32."""
    words = (a >> np.uint32(16)).astype(np.uint16), a.astype(np.uint16)
    high, low = (word.view(np.float16).astype(np.float32) for word in words)
    return high, low


def _convert(parts: tuple[str, ...]) -> Operation:
    target, source = parts[-2:]
    relu = "relu" in parts
    if target == "f16x2":
        table = _table(source[:-2], relu)

        def widen(a: Array) -> Array:
            high = table[a >> np.uint16(8)].astype(np.uint32)
            low = table[a & np.uint16(0xFF)]
            return np.asarray((high << np.uint32(16)) | low)

        return Operation(widen, ("u16",), ("u32",))
    single = _narrowed(target[:-2], relu)

    def pack(high: Array, low: Array) -> Array:
        return (single(high).astype(np.uint16) << np.uint16(8)) | single(low)

    if source == "f32":
        return Operation(pack, ("f32", "f32"), ("u16",))
    return Operation(lambda a: pack(*_halves(a)), ("u32",), ("u16",))


FORMS: Table = {
    "cvt: rn satfinite ?relu | e4m3x2,e5m2x2 f32,f16x2": _convert,
    "cvt: rn ?relu | f16x2 e4m3x2,e5m2x2": _convert,
}
