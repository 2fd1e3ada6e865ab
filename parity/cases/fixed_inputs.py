"""Fixed inputs from integers: the same bits on every machine and in every torch version."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = (1 << 64) - 1
INTEGER_OF = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def words(count: int, seed: int) -> list[int]:
    """Pseudo-random 64-bit words: the SplitMix64 generator (Steele, Lea & Flood 2014).

    >>> [hex(word) for word in words(2, 0)]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    made, state = [], seed & MASK
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        made.append(z ^ (z >> 31))
    return made


def from_bits(patterns: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose elements have the low bits of the given integers as their bit patterns."""
    width = 8 * dtype.itemsize
    signed = [(word & ((1 << width) - 1)) for word in patterns]
    signed = [word - (1 << width) if word >> (width - 1) else word for word in signed]
    return torch.tensor(signed, dtype=INTEGER_OF[dtype]).view(dtype)


def bits(tensor: Tensor) -> list[int]:
    """The bit patterns of all elements as unsigned integers; every NaN counts as one pattern."""
    width = 8 * tensor.dtype.itemsize
    if not tensor.dtype.is_floating_point:
        return [int(value) for value in tensor.reshape(-1).tolist()]
    plain = torch.where(torch.isnan(tensor), torch.full_like(tensor, torch.nan), tensor)
    integers = plain.reshape(-1).contiguous().view(INTEGER_OF[tensor.dtype])
    return [int(value) & ((1 << width) - 1) for value in integers.tolist()]


def moderate(count: int, seed: int, dtype: torch.dtype, *, low: int = -6, high: int = 2) -> Tensor:
    """Finite values of both signs with random significands and exponents in [low, high]."""
    made = []
    for word in words(count, seed):
        exponent = low + (word >> 33) % (high - low + 1)
        sign = -1.0 if word & 1 else 1.0
        made.append(sign * (1.0 + ((word >> 1) & 0x7FFFFF) / 2**23) * 2.0**exponent)
    return torch.tensor(made, dtype=torch.float64).to(dtype)


def anything(count: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Every kind of bit pattern with equal chance: subnormals, huge values, infinities, NaN."""
    return from_bits(words(count, seed), dtype)
