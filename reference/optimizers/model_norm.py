"""The norm of all gradients of a model, for every norm type and over ranks.

    p = 2, 1:  (sum |g|^p)^(1/p) from the real sum, rounded once to float64, the root once to fp32
    p = inf:   max |g|
    other p:   the same in float64, each power rounded; not exact, and infinite where that is

All gradients enter one sum before the root. Parts that lie on several ranks are added over their
process groups as Python integers, so that the number and order of ranks cannot matter.

Ranks that hold the same experts should hold the same gradients of them, but may reduce these in
another order. Their sums of |g|^p are averaged (rounded down to a multiple of 2^-352), and their
maxima compared, so that all ranks clip alike; of equal sums the average is the sum, bit for bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Groups
from twinstep.reference.arithmetic import float64, fp32
from twinstep.reference.norm import elements
from twinstep.reference.optimizers.collectives import largest, summed
from twinstep.reference.unscale import worst_of

# Squares of fp32 numbers are multiples of 2^-298 below 2^256; below that there is room to divide.
UNITS = 2**352
Number = TypeVar("Number", int, float)


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
        worst: what is known of other gradients, as `reference.unscale.worst_of` reports it.

    Specials: any NaN gives NaN, otherwise any infinity gives +inf; nothing at all gives 0.
    """
    for part in parts:
        worst = max(worst, largest(worst_of(part.tensors), part.everyone).item())
    if norm_type == 2.0:
        return norm_of_squares(0 if worst else sum(_exact_sum(p, 2.0) for p in parts), worst)
    if worst:
        return _not_finite(worst)
    if norm_type == math.inf:
        return _largest(parts)
    if norm_type == 1.0:
        return _to_fp32(sum(_exact_sum(part, 1.0) for part in parts) / UNITS)
    total = _sum_of_powers([_float_sum(part, norm_type) for part in parts], 1.0)
    return _to_fp32(_sum_of_powers([total], 1.0 / norm_type))


def norm_of_squares(total: int, worst: float) -> Tensor:
    """The norm whose square is known; fp32, shape ().

    Args:
        total: sum of `exact_sum` over everything.
        worst: as `reference.unscale.worst_of` reports it.
    """
    return _not_finite(worst) if worst else _to_fp32(math.sqrt(total / UNITS))


def _not_finite(worst: float) -> Tensor:
    return torch.tensor(math.nan if worst == 2.0 else math.inf, dtype=torch.float32)


def _to_fp32(x: float) -> Tensor:
    return fp32(float64(x))


def _largest(parts: Sequence[Part]) -> Tensor:
    worst = torch.zeros(())
    for part in parts:
        of_part = torch.zeros(())
        for tensor in part.tensors:
            if tensor.numel():
                of_part = torch.maximum(of_part, fp32(tensor).abs().max())
        worst = torch.maximum(worst, largest(of_part, part.everyone))
    return worst


def _exact_sum(part: Part, norm_type: float) -> int:
    """The real sum of |g| or g^2 over the part and its groups, as a multiple of 2^-352."""
    return _over_ranks(exact_sum(part.tensors, norm_type), part, _gathered, operator.floordiv)


def exact_sum(tensors: Iterable[Tensor], norm_type: float = 2.0) -> int:
    """The real sum of |g| (norm_type 1) or g^2 (2) on this rank, as a multiple of 2^-352."""
    terms = (x * x if norm_type == 2.0 else abs(x) for x in elements(tensors))
    return sum(int(term * UNITS) for term in terms)


def _float_sum(part: Part, norm_type: float) -> float:
    own = _sum_of_powers([abs(x) for x in elements(part.tensors)], norm_type)
    return _over_ranks(own, part, _reduced, operator.truediv)


def _over_ranks(
    own: Number,
    part: Part,
    added: Callable[[Number, Groups], Number],
    divided: Callable[[Number, int], Number],
) -> Number:
    """The sum over the part's groups, averaged over those that hold the same gradients."""
    total = added(own, part.experts)
    if part.replicas is not None:
        total = divided(added(total, [part.replicas]), dist.get_world_size(part.replicas))
    return added(total, part.groups)


def _gathered(total: int, groups: Groups) -> int:
    """The sum over each group in turn, exact."""
    for group in groups:
        numbers = [0] * dist.get_world_size(group)
        dist.all_gather_object(numbers, total, group=group)
        total = sum(numbers)
    return total


def _reduced(total: float, groups: Groups) -> float:
    """The sum over each group in turn, in float64."""
    return summed(float64(total), groups).item()


def _sum_of_powers(values: Sequence[float], power: float) -> float:
    """In float64, rounded once after each power; what float64 cannot hold is infinite."""
    # Python raises where IEEE arithmetic gives an infinity.
    try:
        powers = [value**power for value in values]
        return math.fsum(powers)
    except OverflowError:
        return math.inf
