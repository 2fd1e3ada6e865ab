"""Gradients and weights by bit pattern, from a seed; needs torch alone.

Seed 0 is the plain one: what a failure is shrunk towards.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar, cast

import torch
from torch import Tensor

Value = TypeVar("Value")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
INTEGER = {2: torch.int16, 4: torch.int32}
# `planted` is one infinity or NaN among ordinary values: an overflow. `opposite` sums to zero.
REGIMES = (
    "ordinary",
    "tiny",
    "zeros",
    "subnormal",
    "extreme",
    "bits",
    "planted",
    "opposite",
    "rows",
)
# One NaN for all: an argument is found among its choices, where NaN equals itself alone.
INF, NAN = float("inf"), float("nan")
PLANTED = (INF, -INF, NAN)
LAYOUTS = ("expanded", "transposed", "sparse", "graph")


class Dice:
    """Draws from sequences; with seed 0 always the first."""

    def __init__(self, seed: int) -> None:
        self.random = None if seed == 0 else Random(seed)
        # Its own, so that other draws do not depend on it.
        self.sizes = Random(f"smaller {seed}")

    def pick(self, choices: Sequence[Value]) -> Value:
        """One of the choices."""
        return choices[0] if self.random is None else self.random.choice(choices)

    def smaller(self, value: Value) -> Value:
        """A float, in one of three draws down to a hundredth of it; all else as it is."""
        part = max(0.0, 3.0 * self.sizes.random() - 2.0)
        least = isinstance(value, float) and self.random is not None
        return cast(Value, cast(float, value) * 100.0**-part) if least else value


def filled(shape: tuple[int, ...], dtype: torch.dtype, regime: str, seed: int) -> Tensor:
    """A tensor on the CPU with values of a regime."""
    count = torch.Size(shape).numel()
    if regime == "ordinary" and seed == 0:
        return torch.ones(shape, dtype=dtype)
    source = torch.Generator().manual_seed(seed)
    if regime == "rows" and shape:
        # Those of an embedding whose tokens are not in the batch are zero.
        values = _reals(count, "ordinary", source).to(dtype).reshape(shape)
        return values * (torch.rand(shape[:-1], generator=source) < 0.5).unsqueeze(-1)
    if regime in ("ordinary", "planted", "tiny", "zeros", "opposite", "rows"):
        values = _reals(count, regime, source).to(dtype)
        if regime == "planted" and count:
            values[seed % count] = PLANTED[seed % 3]
        return values.reshape(shape)
    return _patterns(count, dtype, regime, source).reshape(shape)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Values in another layout: in one element's memory, transposed, sparse, or with a graph."""
    if values.dim() == 0 or values.numel() == 0:
        return values
    if layout == "expanded":
        return values.reshape(-1)[:1].expand(values.shape)
    if layout == "graph":
        return values.clone().requires_grad_() * 1
    if layout == "sparse":
        return values.to_sparse()
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def _reals(count: int, regime: str, source: torch.Generator) -> Tensor:
    values = torch.randn(count, generator=source, dtype=torch.float64)
    if regime == "zeros":
        return torch.copysign(torch.zeros(count, dtype=torch.float64), values)
    if regime == "opposite":
        half = values[: count // 2]
        return torch.cat([half, -half, values.new_zeros(count % 2)])
    spread = torch.rand(count, generator=source, dtype=torch.float64)
    if regime == "tiny":
        return values * 10.0 ** (-8 * spread - 4)
    return values * 10.0 ** (3 * spread - 3)


def _patterns(count: int, dtype: torch.dtype, regime: str, source: torch.Generator) -> Tensor:
    width, mantissa = dtype.itemsize * 8, MANTISSA[dtype]
    top = (1 << (width - 1 - mantissa)) - 2
    exponents = {
        "subnormal": torch.zeros(count, dtype=torch.int64),
        "extreme": torch.where(torch.arange(count) % 2 == 0, top, 1),
        "bits": torch.randint(0, top + 1, (count,), generator=source),
    }
    fraction = torch.randint(0, 1 << mantissa, (count,), generator=source)
    sign = torch.randint(0, 2, (count,), generator=source)
    bits = (exponents[regime] << mantissa) | fraction
    # Two's complement: the sign bit of the float is the sign bit of the integer.
    signed = torch.where(sign == 1, bits - (1 << (width - 1)), bits)
    return signed.to(INTEGER[dtype.itemsize]).view(dtype)
