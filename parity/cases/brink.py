"""Lists whose norm is hard to round: sums of squares on the brink between two fp32 norms.

A norm is fp32(sqrt(S)), where S is the real sum of squares, rounded once to float64. Between two
neighbouring norms lie two neighbouring float64 numbers, and here the sum lies about halfway between
these: any other rounding on the way to S decides for the wrong norm every second time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinstep.parity.cases.formats import FORMATS

# How far the sum lies from the middle, in bits below the distance of the two; None is the middle.
BELOW = (3, 20, 60, None)
# Elements that make up for what is missing: each adds the bits of one number.
ROOM = 40
MOST = 2.0**126  # of a norm


def on_the_brink(tensors: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
    """The tensors with other values at up to half of their places, ROOM at most.

    Args:
        tensors: finite, of one dtype or several, any shapes.
        rng: decides places, signs and on which side of the brink.
    """
    rows = [tensor.reshape(-1).clone() for tensor in tensors]
    places = [(row, at) for row, tensor in enumerate(rows) for at in range(tensor.numel())]
    chosen = rng.permutation(len(places))[: min(ROOM, (len(places) + 1) // 2)]
    for choice in chosen:
        row, at = places[choice]
        rows[row][at] = 0
    values = np.concatenate([row.double().numpy() for row in rows]) if rows else np.zeros(0)
    unit = min((_lowest(row.dtype) for row in rows), default=0)
    wanted = _wanted(math.sqrt(math.fsum(values * values)), unit, rng)
    missing = wanted - sum(_whole(value, unit) ** 2 for value in values.tolist() if value)
    for choice in chosen:
        row, at = places[choice]
        low = _lowest(rows[row].dtype) - unit
        part = _number(math.isqrt(max(missing, 0)) >> low << low, rows[row].dtype, unit)
        missing -= part**2
        rows[row][at] = math.ldexp(part, unit) * (1 if rng.integers(2) else -1)
    return [row.reshape(tensor.shape) for row, tensor in zip(rows, tensors, strict=True)]


def _lowest(dtype: torch.dtype) -> int:
    """Exponent of the smallest positive number."""
    return round(math.log2(torch.finfo(dtype).smallest_normal)) - FORMATS[dtype].mantissa


def _whole(value: float, unit: int) -> int:
    """The magnitude in multiples of 2^unit."""
    numerator, denominator = abs(value).as_integer_ratio()
    return (numerator << -unit) // denominator


def _number(whole: int, dtype: torch.dtype, unit: int) -> int:
    """The largest number of this dtype that is not above `whole`, in multiples of 2^unit."""
    spare = max(0, whole.bit_length() - FORMATS[dtype].mantissa - 1)
    return min(whole >> spare << spare, _whole(torch.finfo(dtype).max, unit))


def _wanted(root: float, unit: int, rng: np.random.Generator) -> int:
    """A sum above root^2 that is on the brink, in multiples of 2^(2 unit)."""
    root = min(root * 2.0 ** rng.uniform(0.1, 6.0), MOST)
    norm = np.float32(max(root, math.ldexp(1.0, unit + 16)))
    tie = (float(norm) + float(np.nextafter(norm, np.float32(np.inf)))) / 2
    above = tie * tie
    # Exact, as `tie` has 25 bits; its root is rounded too, so that the brink lies somewhat further.
    while np.float32(math.sqrt(above)) == norm:
        above = math.nextafter(above, math.inf)
    while np.float32(math.sqrt(math.nextafter(above, 0.0))) != norm:
        above = math.nextafter(above, 0.0)
    fine = 2 * unit - 64
    twice = sum(_whole(end, fine) for end in (above, math.nextafter(above, 0.0)))
    below = BELOW[rng.integers(len(BELOW))]
    aside = 0 if below is None else _whole(math.ulp(above), fine) >> below
    return (twice // 2 + (aside if rng.integers(2) else -aside)) >> 64
