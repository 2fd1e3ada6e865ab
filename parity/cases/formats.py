"""Facts about the floating-point formats, and bit patterns drawn by them.

Bits are handled as unsigned integers in NumPy (`uint16` for fp16 and bf16, `uint32` for fp32),
which has no bf16; tensors are made by reinterpreting, never by converting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.unsignedinteger]


INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Format:
    """One binary format.

    Attributes:
        dtype: of the tensors.
        name: as in the table.
        width: bits altogether.
        mantissa: stored bits of the significand.
        finite_only: no infinity: the magnitude past the largest number is NaN.
    """

    dtype: torch.dtype
    name: str
    width: int
    mantissa: int
    finite_only: bool = False

    @property
    def unsigned(self) -> type[np.unsignedinteger]:
        """The NumPy integer of the same width."""
        by_width: dict[int, type[np.unsignedinteger]] = {
            8: np.uint8,
            16: np.uint16,
            32: np.uint32,
            64: np.uint64,
        }
        return by_width[self.width]

    @property
    def signed(self) -> torch.dtype:
        """The torch integer of the same width."""
        return INTEGERS[self.width]

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.width - 1)

    @property
    def infinity(self) -> int:
        """Bits of +inf, or of the only NaN; below lie the finite magnitudes, above all NaNs."""
        return self.sign - (1 if self.finite_only else 1 << self.mantissa)

    @property
    def tiny(self) -> int:
        """Bits of the smallest normal number."""
        return 1 << self.mantissa


FP16 = Format(dtype=torch.float16, name="fp16", width=16, mantissa=10)
BF16 = Format(dtype=torch.bfloat16, name="bf16", width=16, mantissa=7)
FP32 = Format(dtype=torch.float32, name="fp32", width=32, mantissa=23)
FP64 = Format(dtype=torch.float64, name="fp64", width=64, mantissa=52)
E4M3 = Format(dtype=torch.float8_e4m3fn, name="fp8-e4m3", width=8, mantissa=3, finite_only=True)
E5M2 = Format(dtype=torch.float8_e5m2, name="fp8-e5m2", width=8, mantissa=2)
FORMATS = {row.dtype: row for row in (FP16, BF16, FP32, FP64, E4M3, E5M2)}


def to_tensor(bits: Bits, form: Format) -> Tensor:
    """The tensor with these bits."""
    signed = bits.astype(form.unsigned).view(f"i{form.width // 8}")
    return torch.from_numpy(signed.copy()).view(form.dtype)


def to_bits(tensor: Tensor) -> Bits:
    """The bits of a floating-point tensor, flattened, as unsigned integers."""
    form = FORMATS[tensor.dtype]
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(form.signed)
    return flat.numpy().view(form.unsigned)


def finite_bits(rng: np.random.Generator, count: int, form: Format) -> Bits:
    """Any finite pattern, all exponents alike."""
    return _signed(rng, rng.integers(0, form.infinity, count), form)


def binade_bits(bits: Bits, form: Format, exponent: int) -> Bits:
    """The same signs and mantissas, all with this exponent field."""
    keep = form.sign | ((1 << form.mantissa) - 1)
    return (bits.astype(np.uint64) & keep | exponent << form.mantissa).astype(form.unsigned)


def subnormal_bits(rng: np.random.Generator, count: int, form: Format) -> Bits:
    """Subnormals and the first few normals; half of the time, those below a power of two."""
    top = form.tiny + 4
    if rng.integers(0, 2):
        top = 1 << int(rng.integers(1, form.mantissa))
    return _signed(rng, rng.integers(0, top, count), form)


def extreme_bits(rng: np.random.Generator, count: int, form: Format) -> Bits:
    """Largest, almost largest, half the largest, smallest normal and subnormal, and one."""
    one = ((1 << (form.width - 2 - form.mantissa)) - 1) << form.mantissa
    top = form.infinity - 1
    table = [top, top - 1, top - form.tiny, form.tiny, form.tiny - 1, 1, one, one - 1, one + 1]
    return _signed(rng, rng.choice(np.array(table, dtype=np.int64), count), form)


def non_finite_bits(form: Format) -> dict[str, int]:
    """Every kind of non-finite pattern, and the largest finite number, by name."""
    quiet = form.infinity | (1 << (form.mantissa - 1))
    return {
        "+inf": form.infinity,
        "-inf": form.infinity | form.sign,
        "NaN": quiet,
        "signalling NaN": form.infinity | 1,
        "-NaN": quiet | form.sign | 1,
        "full NaN": form.sign - 1,
        "-full NaN": 2 * form.sign - 1,
        "huge": form.infinity - 1,
    }


def _signed(rng: np.random.Generator, magnitude: NDArray[np.int64], form: Format) -> Bits:
    signs = rng.integers(0, 2, magnitude.shape[0]).astype(np.uint64) * np.uint64(form.sign)
    return (magnitude.astype(np.uint64) | signs).astype(form.unsigned)


def widened(tensor: Tensor) -> Tensor:
    """A tensor of 8-bit floats as fp32, in which torch computes; any other as it is."""
    return tensor.float() if tensor.dtype in FORMATS and tensor.itemsize == 1 else tensor


def integers(rng: np.random.Generator, count: int, dtype: torch.dtype) -> Tensor:
    """Any value of an integer type, every eighth at or next to an end or zero."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    drawn = rng.integers(least, most, count, endpoint=True)
    ends = rng.choice(np.array([least, least + 1, 0, 1, most - 1, most]), count)
    return torch.from_numpy(np.where(rng.integers(0, 8, count) == 0, ends, drawn)).to(dtype)
