"""Integer arithmetic: add, sub, mul, mad, div, rem, min, max, abs, neg, sad and carries.

Two's complement, wrapping, as the PTX ISA states; sums and low products are formed unsigned.
Division by zero gives all ones (quotient) and the dividend (remainder), as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array, raw, width
from twinstep.replay.isa.half import packed
from twinstep.replay.isa.operations import Operation, Table

_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
}


def doubled(kind: str) -> str:
    """The integer type of twice the width."""
    return f"{kind[0]}{16 * width(kind)}"


def high_product(kind: str) -> Callable[[Array, Array], Array]:
    """The upper half of the full product of two integers of a type."""
    if width(kind) < 8:
        wide, bits = NUMPY[doubled(kind)], 8 * width(kind)

        def narrow_high(a: Array, b: Array) -> Array:
            return np.asarray(
                ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(NUMPY[kind])
            )

        return narrow_high
    return _high64 if kind == "u64" else _high64_signed


def _high64(a: Array, b: Array) -> Array:
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & mask, a >> shift, b & mask, b >> shift
    middle = a1 * b0 + ((a0 * b0) >> shift)
    carry = (middle & mask) + a0 * b1
    result: Array = a1 * b1 + (middle >> shift) + (carry >> shift)
    return result


def _high64_signed(a: Array, b: Array) -> Array:
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    high = _high64(ua, ub)
    high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(np.int64)


def wide_product(kind: str) -> Callable[[Array, Array], Array]:
    """The full product of two 16- or 32-bit integers."""
    wide = NUMPY[doubled(kind)]

    def multiply(a: Array, b: Array) -> Array:
        return np.multiply(a, b, dtype=wide)

    return multiply


def quotient(kind: str) -> Callable[[Array, Array], Array]:
    """Division truncated toward zero."""

    def unsigned(a: Array, b: Array) -> Array:
        zero = b == 0
        safe = np.where(zero, b.dtype.type(1), b)
        return np.where(zero, ~b.dtype.type(0), a // safe)

    def signed(a: Array, b: Array) -> Array:
        negative = (a < 0) ^ (b < 0)
        unsigned_kind = NUMPY[raw(kind)]
        magnitude = unsigned(
            np.abs(a).view(unsigned_kind), np.where(b < 0, -b, b).view(unsigned_kind)
        ).view(NUMPY[kind])
        return np.where(b == 0, b.dtype.type(-1), np.where(negative, -magnitude, magnitude))

    return signed if kind[0] == "s" else unsigned


def remainder(kind: str) -> Callable[[Array, Array], Array]:
    """The remainder with the sign of the dividend."""
    divide = quotient(kind)

    def function(a: Array, b: Array) -> Array:
        return np.where(b == 0, a, a - divide(a, b) * b)

    return function


def _pairs(parts: tuple[str, ...]) -> Operation:
    """A function of two 16-bit integers on both halves of words."""
    function, dtype = _UFUNCS[parts[0]], NUMPY[parts[-1].removesuffix("x2")]

    def scalar(a: Array, b: Array) -> Array:
        result: Array = function(a.view(dtype), b.view(dtype))
        return (np.maximum(result, 0) if "relu" in parts else result).view(np.uint16)

    return Operation(packed(scalar), ("u32", "u32"), ("u32",))


def _sum(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    return Operation(_UFUNCS[parts[0]], (kind, kind), (kind,))


def _saturating_sum(parts: tuple[str, ...]) -> Operation:
    sign = 1 if parts[0] == "add" else -1

    def function(a: Array, b: Array) -> Array:
        total = a.astype(np.int64) + sign * b.astype(np.int64)
        return np.asarray(np.clip(total, -(2**31), 2**31 - 1).astype(np.int32))

    return Operation(function, ("s32", "s32"), ("s32",))


def _carry_out(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])

    def add(a: Array, b: Array) -> tuple[Array, Array]:
        total = a + b
        return total, total < a

    def subtract(a: Array, b: Array) -> tuple[Array, Array]:
        return a - b, a < b

    return Operation(add if parts[0] == "add" else subtract, (kind, kind), (kind, "pred"))


def _carry_in(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])

    def add(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
        first = a + b
        total = first + carry.astype(a.dtype)
        return total, (first < a) | (total < first)

    def subtract(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
        first = a - b
        total = first - borrow.astype(a.dtype)
        return total, (a < b) | (first < total)

    function = add if parts[0] == "addc" else subtract
    return Operation(function, (kind, kind, "pred"), (kind, "pred"))


def _carried_product(parts: tuple[str, ...]) -> Operation:
    """mad.cc and madc: half of the product, plus c, plus the carry; the carry out second."""
    kind, add = parts[-1], _carry_in(("addc", parts[-1])).function
    high, signed = high_product(kind), NUMPY[kind]

    def function(a: Array, b: Array, c: Array, carry: Array | None = None) -> object:
        part = high(a.view(signed), b.view(signed)).view(a.dtype) if parts[1] == "hi" else a * b
        return add(part, c, np.zeros_like(part, np.bool_) if carry is None else carry)

    carries = ("pred",) if parts[0] == "madc" else ()
    return Operation(function, (raw(kind),) * 3 + carries, (raw(kind), "pred"))  # type: ignore[arg-type]


def _product(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    if parts[1] == "hi":
        return Operation(high_product(kind), (kind, kind), (kind,))
    return Operation(np.multiply, (raw(kind),) * 2, (raw(kind),))


def _wide_product(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    return Operation(wide_product(kind), (kind, kind), (doubled(kind),))


def _multiply_add(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    if parts[1] == "hi":
        upper = high_product(kind)
        return Operation(lambda a, b, c: upper(a, b) + c, (kind,) * 3, (kind,))
    return Operation(lambda a, b, c: a * b + c, (raw(kind),) * 3, (raw(kind),))


def _wide_multiply_add(parts: tuple[str, ...]) -> Operation:
    kind, result = parts[-1], doubled(parts[-1])
    multiply = wide_product(kind)
    return Operation(lambda a, b, c: multiply(a, b) + c, (kind, kind, result), (result,))


def _product24(parts: tuple[str, ...]) -> Operation:
    """mul24 and mad24: bits 0 to 31 or 16 to 47 of the product of the low 24 bits, plus c."""
    kind = parts[-1]
    drop, shift = NUMPY[kind].type(8), np.int64(16 if parts[1] == "hi" else 0)

    def multiply(a: Array, b: Array) -> Array:
        full = ((a << drop) >> drop).astype(np.int64) * ((b << drop) >> drop).astype(np.int64)
        return np.asarray((full >> shift).astype(NUMPY[kind]))

    if parts[0] == "mul24":
        return Operation(multiply, (kind, kind), (kind,))
    add = _saturating_sum(("add",)).function if "sat" in parts else np.add
    return Operation(lambda a, b, c: add(multiply(a, b), c), (kind,) * 3, (kind,))


def _quotient(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    function = quotient(kind) if parts[0] == "div" else remainder(kind)
    return Operation(function, (kind, kind), (kind,))


def _absolute_difference(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]

    def function(a: Array, b: Array, c: Array) -> Array:
        difference = np.where(a > b, a - b, b - a).view(NUMPY[raw(kind)])
        return np.asarray(c.view(NUMPY[raw(kind)]) + difference)

    return Operation(function, (kind,) * 3, (raw(kind),))


def _extremum(parts: tuple[str, ...]) -> Operation:
    kind, function = parts[-1], _UFUNCS[parts[0]]
    if "relu" in parts:
        return Operation(lambda a, b: np.maximum(function(a, b), 0), (kind, kind), (kind,))
    return Operation(function, (kind, kind), (kind,))


def _sign(parts: tuple[str, ...]) -> Operation:
    return Operation(np.abs if parts[0] == "abs" else np.negative, (parts[-1],), (parts[-1],))


FORMS: Table = {
    "add sub: | $int": _sum,
    "add sub: sat | s32": _saturating_sum,
    "add min max: | u16x2,s16x2": _pairs,
    "min max: relu | s16x2": _pairs,
    "add sub: cc | u32,s32,u64,s64": _carry_out,
    "addc subc: ?cc | u32,s32,u64,s64": _carry_in,
    "mad: lo,hi cc | u32,s32,u64,s64": _carried_product,
    "madc: lo,hi ?cc | u32,s32,u64,s64": _carried_product,
    "mul: lo,hi | $int": _product,
    "mul: wide | u16,s16,u32,s32": _wide_product,
    "mad: lo,hi | $int": _multiply_add,
    "mad: wide | u16,s16,u32,s32": _wide_multiply_add,
    "mul24 mad24: lo,hi | u32,s32": _product24,
    "mad24: hi sat | s32": _product24,
    "div rem: | $int": _quotient,
    "min max: | $int": _extremum,
    "min max: relu | s32": _extremum,
    "sad: | $int": _absolute_difference,
    "abs neg: | s16,s32,s64": _sign,
}
