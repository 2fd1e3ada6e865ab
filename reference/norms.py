"""Norms of all gradients of a model, for every norm type and over ranks.

    p = 2, 1:  (sum |g|^p)^(1/p) from the real sum, rounded once to float64, the root once to fp32
    p = inf:   max |g|
    other p:   the same in float64, each power rounded; not exact, and infinite where that is

All gradients enter one sum before the root. Parts that lie on several ranks are added over their
process groups as integers, so that the number and order of ranks cannot matter.

Ranks that hold the same experts should hold the same gradients of them, but may reduce these in
another order. Their sums of |g|^p are averaged (rounded down to a multiple of 2^-352), and their
maxima compared, so that all ranks clip alike; of equal sums the average is the sum, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Groups
from twinstep.reference.arithmetic import fp32, fp64
from twinstep.reference.collectives import largest, summed
from twinstep.reference.overflow import worst_of

# Squares of fp32 numbers are multiples of 2^-298 below 2^256; below that there is room to divide.
UNIT = 352
LIMB = 32
LIMBS = 24


@dataclass(frozen=True, kw_only=True)
class Part:
    """Gradients that are added up together.

    Attributes:
        tensors: fp32, fp16 or bf16, any shapes; may be empty.
        experts: over which their sum is added first: ranks that hold different experts.
        replicas: over which that sum is averaged: ranks that hold the same experts, or None.
        groups: over which the average is added, in turn; none for gradients of this rank alone.
    """

    tensors: Sequence[Tensor]
    experts: Groups = ()
    replicas: dist.ProcessGroup | None = None
    groups: Groups = ()

    @property
    def everyone(self) -> Groups:
        """All groups, in the order in which they meet."""
        return [*self.experts, *([] if self.replicas is None else [self.replicas]), *self.groups]


def check_norm_type(norm_type: float, where: str) -> float:
    """The norm type as a float.

    Raises:
        ValueError: it is not positive; infinity is.
    """
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type={norm_type}, but should be positive or infinite [{where}]")
    return float(norm_type)


def norm_of_parts(parts: Sequence[Part], norm_type: float = 2.0, *, worst: float = 0.0) -> Tensor:
    """The norm of everything in the parts; fp32, shape ().

    Args:
        parts: in the same order on all ranks.
        norm_type: positive.
        worst: what is known of other gradients, as `reference.overflow.worst_of` says it.

    Specials: any NaN gives NaN, otherwise any infinity gives +inf; nothing at all gives 0.
    """
    for part in parts:
        worst = max(worst, largest(worst_of(part.tensors), part.everyone).item())
    if worst:
        return torch.tensor(math.nan if worst == 2.0 else math.inf, dtype=torch.float32)
    if norm_type == math.inf:
        return _largest(parts)
    if norm_type in (1.0, 2.0):
        total = sum(_exact(part, int(norm_type)) for part in parts) / 2**UNIT
        return _rounded(math.sqrt(total) if norm_type == 2.0 else total)
    total = _sum_of_powers([_powers(part, norm_type) for part in parts], 1.0)
    return _rounded(_sum_of_powers([total], 1.0 / norm_type))


def _rounded(x: float) -> Tensor:
    return fp32(torch.tensor(x, dtype=torch.float64))


def _largest(parts: Sequence[Part]) -> Tensor:
    worst = torch.zeros(())
    for part in parts:
        of_part = torch.zeros(())
        for tensor in part.tensors:
            if tensor.numel():
                of_part = torch.maximum(of_part, fp32(tensor).abs().max())
        worst = torch.maximum(worst, largest(of_part, part.everyone))
    return worst


def _exact(part: Part, power: int) -> int:
    """The real sum of |g|^power over the part and its groups, as a multiple of 2^-352."""
    total = 0
    for value in _magnitudes(part):
        term = value * value if power == 2 else value
        numerator, denominator = term.as_integer_ratio()
        total += numerator * (2**UNIT // denominator)
    total = _number(summed(_limbs(total), part.experts))
    if part.replicas is not None:
        total = _number(summed(_limbs(total), [part.replicas]))
        total //= dist.get_world_size(part.replicas)
    return _number(summed(_limbs(total), part.groups))


def _limbs(total: int) -> Tensor:
    """A whole number as 32-bit digits in 64-bit integers, lowest first; sums of them carry late."""
    digits = [(total >> (LIMB * place)) & (2**LIMB - 1) for place in range(LIMBS)]
    return torch.tensor(digits, dtype=torch.int64)


def _number(limbs: Tensor) -> int:
    return sum(digit << (LIMB * place) for place, digit in enumerate(limbs.tolist()))


def _powers(part: Part, power: float) -> float:
    own = _sum_of_powers(list(_magnitudes(part)), power)
    total = summed(torch.tensor(own, dtype=torch.float64), part.experts)
    if part.replicas is not None:
        total = summed(total, [part.replicas]) / dist.get_world_size(part.replicas)
    return summed(total, part.groups).item()


def _sum_of_powers(values: Sequence[float], power: float) -> float:
    """In float64, rounded once after each power; what float64 cannot hold is infinite."""
    # Python raises where IEEE arithmetic gives an infinity.
    try:
        powers = [value**power for value in values]
        return math.fsum(powers)
    except OverflowError:
        return math.inf


def _magnitudes(part: Part) -> Iterator[float]:
    for tensor in part.tensors:
        yield from fp64(tensor).abs().reshape(-1).tolist()
