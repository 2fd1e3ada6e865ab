"""Reductions over ranks: every operation, in the order of an algorithm, rounded at each hop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Combine = Callable[[Tensor, Tensor], Tensor]

COMBINED: dict[str, Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
OF_BITS = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Operation:
    """A reduce operation.

    Attributes:
        name: in `torch.distributed.ReduceOp`.
        factor: of PREMUL_SUM; each rank has its own.
    """

    name: str
    factor: float | Tensor | None = None


def operation_of(op: dist.ReduceOp, dtype: torch.dtype) -> Operation:
    """Operation of the options of a call.

    Raises:
        ValueError: it is unknown, or not for numbers of this dtype.
    """
    state: Any = op.__getstate__()
    kind, factor = state
    if kind.name not in COMBINED:
        raise ValueError(f"ReduceOp.{kind.name} is not known")
    if kind.name in OF_BITS and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"ReduceOp.{kind.name} is for integers, but the tensor is {dtype}")
    return Operation(kind.name, factor)


def in_order(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """One rank after the other."""
    return functools.reduce(combine, parts)


def ring(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """A chunk for each rank, which starts at the next one and comes round to its own."""
    count = len(parts)
    chunks = list(zip(*(part.tensor_split(count) for part in parts), strict=True))
    turned = [[*chunk[own + 1 :], *chunk[: own + 1]] for own, chunk in enumerate(chunks)]
    return torch.cat([in_order(chunk, combine) for chunk in turned])


def tree(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """Halves of the ranks by themselves, then their two results."""
    if len(parts) == 1:
        return parts[0]
    half = (len(parts) + 1) // 2
    return combine(tree(parts[:half], combine), tree(parts[half:], combine))


def halving(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """Ranks above the largest power of two join one below; then each joins one half way round."""
    half = 1 << (len(parts).bit_length() - 1)
    while len(parts) > 1:
        joined = [combine(*pair) for pair in zip(parts, parts[half:], strict=False)]
        parts = [*joined, *parts[len(joined) : half]]
        half //= 2
    return parts[0]


ORDERS: dict[str, Callable[[Sequence[Tensor], Combine], Tensor]] = {
    "ranks": in_order,
    "ring": ring,
    "tree": tree,
    "halving": halving,
}


def reduced(parts: Sequence[Tensor], operations: Sequence[Operation], order: str) -> Tensor:
    """Flat tensors of all ranks reduced into one, rounded to their dtype at each hop.

    AVG divides the sum, integers towards zero. MIN and MAX of a NaN are NaN.

    Args:
        parts: of one dtype and size.
        operations: of each rank; they differ in their factors alone.
        order: a name in `ORDERS`.
    """
    name = operations[0].name
    if name == "PREMUL_SUM":
        parts = [
            (part * torch.as_tensor(each.factor)).to(part.dtype)
            for part, each in zip(parts, operations, strict=True)
        ]
    total = ORDERS[order](parts, _rounding(COMBINED[name], parts[0].dtype))
    if name == "AVG":
        integer = not (total.is_floating_point() or total.is_complex())
        wide = total.float() if _is_byte_float(total.dtype) else total
        mode = "trunc" if integer else None
        total = torch.div(wide, len(parts), rounding_mode=mode).to(total.dtype)
    return total


def _is_byte_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _rounding(combine: Combine, dtype: torch.dtype) -> Combine:
    """The operation, by way of fp32 for the floats of 8 bits, which torch does not add."""
    if not _is_byte_float(dtype):
        return combine
    return lambda a, b: combine(a.float(), b.float()).to(dtype)
