"""PTX types and the NumPy arrays that hold them.

A register is a bit pattern. Replay keeps it as an array of any dtype of the right width and takes
a view when an instruction asks for another type. bf16 has no NumPy type and is held as uint16;
packed pairs (f16x2, bf16x2) as uint32, f32x2 as uint64. Predicates are bool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""A register, address or buffer: its dtype is known to the instruction, not to the type."""

NUMPY: dict[str, np.dtype[Any]] = {
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "s8": np.dtype(np.int8),
    "s16": np.dtype(np.int16),
    "s32": np.dtype(np.int32),
    "s64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "b8": np.dtype(np.uint8),
    "b16": np.dtype(np.uint16),
    "b32": np.dtype(np.uint32),
    "b64": np.dtype(np.uint64),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "s16x2": np.dtype(np.uint32),
    "u16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
    "e4m3x2": np.dtype(np.uint16),
    "e5m2x2": np.dtype(np.uint16),
    "tf32": np.dtype(np.uint32),
    "pred": np.dtype(np.bool_),
}

UNSIGNED = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}

UNDEFINED = 0xCDCDCDCDCDCDCDCD
"""The value of a register that the program reads before it writes it."""


def width(kind: str) -> int:
    """Bytes of one value of a PTX type (predicates count as one byte)."""
    return NUMPY[kind].itemsize


def raw(kind: str) -> str:
    """The unsigned type of the same width."""
    return "pred" if kind == "pred" else UNSIGNED[width(kind)]


def undefined(kind: str) -> Array:
    """A uniform value for a register never written: a recognisable pattern, False for bool."""
    if kind == "pred":
        return np.zeros((1, 1), np.bool_)
    size = width(kind)
    pattern = np.array([[UNDEFINED & ((1 << (8 * size)) - 1)]], NUMPY[UNSIGNED[size]])
    return pattern.view(NUMPY[kind])


def stretched(value: Array, shape: tuple[int, ...]) -> Array:
    """`numpy.broadcast_to`, cheaper where nothing must be done or little is copied."""
    if value.shape == shape:
        return value
    if shape[0] * shape[-1] > 4096 or len(shape) != 2:
        return np.broadcast_to(value, shape)
    whole = np.empty(shape, value.dtype)
    whole[...] = value
    return whole
