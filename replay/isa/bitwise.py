"""Bit instructions: logic, shifts, fields, permutation, counting, packing and selection."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array, raw, width
from twinstep.replay.isa.operations import Operation, Table
from twinstep.replay.isa.rounding import flush

_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _logic(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    return Operation(_LOGIC[parts[0]], (kind, kind), (kind,))


def _not(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    return Operation(np.invert, (kind,), (kind,))


def _logical_not(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    return Operation(lambda a: (a == 0).astype(a.dtype), (kind,), (kind,))


def _shift(parts: tuple[str, ...]) -> Operation:
    # Amounts of the width or more give 0 (or the sign), which is what NumPy's shifts do too.
    kind = raw(parts[-1]) if parts[0] == "shl" else parts[-1]
    function = np.left_shift if parts[0] == "shl" else np.right_shift
    dtype, bits = NUMPY[kind], 8 * width(kind)

    def shift(a: Array, amount: Array) -> Array:
        if bits < 32:
            amount = np.minimum(amount, np.uint32(bits))
        return np.asarray(function(a, amount.astype(dtype)))

    def shift32(a: Array, amount: Array) -> Array:
        if dtype.kind == "i":
            amount = np.minimum(amount, np.uint32(31))
        return np.asarray(function(a, amount.view(dtype)))

    return Operation(shift32 if bits == 32 else shift, (kind, "u32"), (kind,), plain=function)


def _funnel(parts: tuple[str, ...]) -> Operation:
    left, clamp = parts[1] == "l", parts[2] == "clamp"

    def function(low: Array, high: Array, amount: Array) -> Array:
        n = np.minimum(amount, np.uint32(32)) if clamp else amount & np.uint32(31)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        n64 = n.astype(np.uint64)
        shifted = (both << n64) >> np.uint64(32) if left else both >> n64
        return shifted.astype(np.uint32)

    return Operation(function, ("u32",) * 3, ("u32",))


def _extract(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    bits, dtype = 8 * width(kind), NUMPY[kind]
    unsigned = NUMPY[raw(kind)]

    def function(a: Array, position: Array, length: Array) -> Array:
        start, size = position & np.uint32(0xFF), length & np.uint32(0xFF)
        reach = np.minimum(start.astype(np.int64) + size, bits)
        kept = np.maximum(reach - start, 0)
        drop = (bits - reach).astype(dtype)
        fill = np.where(kept > 0, bits - kept, 0).astype(dtype)
        field = (a.view(unsigned) << drop.view(unsigned)).view(dtype) >> fill
        if dtype.kind == "u":
            return np.asarray(np.where(kept > 0, field, dtype.type(0)))
        # Past the end of the word the sign bit of the source fills in.
        sign = np.where(size == 0, dtype.type(0), a >> dtype.type(bits - 1))
        return np.asarray(np.where(kept > 0, field, sign))

    return Operation(function, (kind, "u32", "u32"), (kind,))


def _insert(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    bits, one = 8 * width(kind), NUMPY[kind].type(1)

    def function(a: Array, b: Array, position: Array, length: Array) -> Array:
        start = (position & np.uint32(0xFF)).astype(a.dtype)
        size = (length & np.uint32(0xFF)).astype(a.dtype)
        ones = np.where(size >= bits, ~NUMPY[kind].type(0), (one << size) - one)
        mask = ones << start
        return np.asarray((b & ~mask) | ((a << start) & mask))

    return Operation(function, (kind, kind, "u32", "u32"), (kind,))


def _lookup3(parts: tuple[str, ...]) -> Operation:
    def function(a: Array, b: Array, c: Array, table: Array) -> Array:
        lut = int(table.flat[0])
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for index in range(8):
            if lut >> index & 1:
                x = a if index & 4 else ~a
                y = b if index & 2 else ~b
                z = c if index & 1 else ~c
                result |= x & y & z
        return result

    return Operation(function, ("u32",) * 4, ("u32",))


def _permute(parts: tuple[str, ...]) -> Operation:
    def function(a: Array, b: Array, selector: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros((1, 1), np.uint32)
        for byte in range(4):
            nibble = (selector >> np.uint32(4 * byte)) & np.uint32(0xF)
            shift = ((nibble & np.uint32(7)) << np.uint32(3)).astype(np.uint64)
            value = ((both >> shift) & np.uint64(0xFF)).astype(np.uint32)
            sign = np.where(value & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            value = np.where(nibble & np.uint32(8), sign, value)
            result = result | (value << np.uint32(8 * byte))
        return result

    return Operation(function, ("u32",) * 3, ("u32",))


_PICKS: dict[str, Callable[[Array, int], Array]] = {
    "f4e": lambda c, byte: c + byte,
    "b4e": lambda c, byte: (c - byte) & 7,
    "rc8": lambda c, byte: c,
    "ecl": lambda c, byte: np.maximum(c, byte),
    "ecr": lambda c, byte: np.minimum(c, byte),
    "rc16": lambda c, byte: 2 * (c & 1) + (byte & 1),
}
"""For each mode of prmt, the source of a byte by the selector's two low bits."""


def _permute_by_mode(parts: tuple[str, ...]) -> Operation:
    pick = _PICKS[parts[2]]

    def function(a: Array, b: Array, selector: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        control = (selector & np.uint32(3)).astype(np.int64)
        result = np.zeros((1, 1), np.uint64)
        for byte in range(4):
            shift = (8 * pick(control, byte)).astype(np.uint64)
            result = result | ((both >> shift) & np.uint64(0xFF)) << np.uint64(8 * byte)
        return result.astype(np.uint32)

    return Operation(function, ("u32",) * 3, ("u32",))


def population(a: Array) -> Array:
    """Number of set bits, as uint32."""
    return np.bitwise_count(a).astype(np.uint32)


def smear(a: Array) -> Array:
    """Every bit at or below the highest set bit."""
    bits = 8 * a.dtype.itemsize
    step = 1
    while step < bits:
        a = a | (a >> a.dtype.type(step))
        step *= 2
    return a


def reverse(a: Array) -> Array:
    """The bits in opposite order."""
    size = a.dtype.itemsize
    shape = a.shape
    raw_bytes = np.ascontiguousarray(a).view(np.uint8).reshape(*shape, size)
    flipped = np.packbits(np.unpackbits(raw_bytes, axis=-1, bitorder="little"), axis=-1)
    return np.ascontiguousarray(flipped[..., ::-1]).view(a.dtype).reshape(shape)


def _count(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    bits = np.uint32(8 * width(kind))
    if parts[0] == "popc":
        return Operation(population, (kind,), ("u32",))
    if parts[0] == "clz":
        return Operation(lambda a: bits - population(smear(a)), (kind,), ("u32",))
    return Operation(reverse, (kind,), (kind,))


def _find_leading(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    bits = np.uint32(8 * width(kind))
    amount = "shiftamt" in parts

    def function(a: Array) -> Array:
        if a.dtype.kind == "i":
            a = np.where(a < 0, ~a, a)
        found = population(smear(a.view(NUMPY[raw(kind)])))
        index = found - np.uint32(1)
        return np.where(found == 0, np.uint32(0xFFFFFFFF), bits - found if amount else index)

    return Operation(function, (kind,), ("u32",))


def _bit_mask(parts: tuple[str, ...]) -> Operation:
    def function(start: Array, size: Array) -> Array:
        if parts[1] == "wrap":
            start, size = start & np.uint32(31), size & np.uint32(31)
        ones = (np.uint64(1) << np.minimum(size, np.uint32(32)).astype(np.uint64)) - np.uint64(1)
        return (ones << np.minimum(start, np.uint32(32)).astype(np.uint64)).astype(np.uint32)

    return Operation(function, ("u32", "u32"), ("u32",))


def _extend(parts: tuple[str, ...]) -> Operation:
    signed = parts[-1] == "s32"

    def function(a: Array, size: Array) -> Array:
        if parts[1] == "wrap":
            size = size & np.uint32(31)
        drop = np.uint32(32) - np.minimum(size, np.uint32(32))
        up = a << drop
        if signed:
            filled = up.view(np.int32) >> np.minimum(drop, np.uint32(31)).view(np.int32)
            return np.where(size == 0, np.int32(0), filled).view(np.uint32)
        return np.where(size == 0, np.uint32(0), up >> drop)

    return Operation(function, ("u32", "u32"), ("u32",))


def _select(parts: tuple[str, ...]) -> Operation:
    kind = raw(parts[-1])
    return Operation(lambda a, b, p: np.where(p, a, b), (kind, kind, "pred"), (kind,))


def _select_by_sign(parts: tuple[str, ...]) -> Operation:
    kind, tested = raw(parts[-2]), parts[-1]
    flushed = flush if "ftz" in parts else np.asarray
    return Operation(lambda a, b, c: np.where(flushed(c) >= 0, a, b), (kind, kind, tested), (kind,))


def _dot(parts: tuple[str, ...]) -> Operation:
    """dp4a: four products of bytes; dp2a: two of 16-bit numbers and the low or high bytes."""
    bits, count = (8, 4) if parts[0] == "dp4a" else (16, 2)
    ka, kb = parts[-2:]
    first = 2 if parts[1] == "hi" else 0

    def lane(x: Array, index: int, kind: str, width: int) -> Array:
        part = (x >> np.uint32(width * index)).astype(f"u{width // 8}")
        return part.view(f"{'i' if kind[0] == 's' else 'u'}{width // 8}").astype(np.int32)

    def function(a: Array, b: Array, c: Array) -> Array:
        total = c.view(np.int32)
        for index in range(count):
            total = total + lane(a, index, ka, bits) * lane(b, first + index, kb, 8)
        return total.view(np.uint32)

    return Operation(function, ("u32",) * 3, ("u32",))


_MOVED = "b16,b32,b64,u16,s16,u32,s32,u64,s64,f32,f64"
FORMS: Table = {
    "and or xor: | pred,b16,b32,b64": _logic,
    "not: | pred,b16,b32,b64": _not,
    "cnot: | b16,b32,b64": _logical_not,
    "shl: | b16,b32,b64": _shift,
    "shr: | b16,b32,b64,u16,s16,u32,s32,u64,s64": _shift,
    "shf: l,r clamp,wrap | b32": _funnel,
    "lop3: | b32": _lookup3,
    "prmt: | b32": _permute,
    "prmt: | b32 f4e,b4e,rc8,ecl,ecr,rc16": _permute_by_mode,
    "bfe: | u32,s32,u64,s64": _extract,
    "bfi: | b32,b64": _insert,
    "brev popc clz: | b32,b64": _count,
    "bfind: ?shiftamt | u32,s32,u64,s64": _find_leading,
    "bmsk: clamp,wrap | b32": _bit_mask,
    "szext: clamp,wrap | u32,s32": _extend,
    f"selp: | {_MOVED}": _select,
    f"slct: | {_MOVED} s32": _select_by_sign,
    f"slct: ?ftz | {_MOVED} f32": _select_by_sign,
    "dp4a: | u32,s32 u32,s32": _dot,
    "dp2a: lo,hi | u32,s32 u32,s32": _dot,
}
