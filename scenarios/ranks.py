"""Data parallelism: micro-batches shared out over ranks, their gradients added in rank order.

Sums are formed in the order in which one process would form them, from gathered parts, and not by
an all-reduce, whose order belongs to the library: with one micro-batch for each rank the bits are
those of one process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

Saved = dict[str, object]
# Exact addends are multiples of UNIT, for a loss that is not scaled; fp32 has all up to MOST of it.
UNIT, MOST = 2.0**-20, 2.0**24


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one model; alone, it communicates with none.

    Attributes:
        number: of this rank.
        count: of ranks.
        group: of all ranks; None for one rank.
    """

    number: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, parts: int) -> range:
        """This rank's micro-batches of a step; ranks in order have all of them in order."""
        each = parts // self.count
        return range(self.number * each, (self.number + 1) * each)

    def gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all ranks, in rank order; of one dtype, on one device.

        Args:
            tensors: of the same shapes on every rank.
        """
        if self.group is None:
            return [list(tensors)]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        rows = [torch.empty_like(flat) for _ in range(self.count)]
        dist.all_gather(rows, flat, group=self.group)
        sizes = [tensor.numel() for tensor in tensors]
        return [
            [
                part.view_as(like)
                for part, like in zip(torch.split(row, sizes), tensors, strict=True)
            ]
            for row in rows
        ]

    def add_(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks, in place: ((t0 + t1) + t2) + ..., in their own dtype."""
        if self.group is None or not tensors:
            return
        first, *others = self.gather(tensors)
        for place, tensor in enumerate(tensors):
            total = first[place]
            for parts in others:
                total = total + parts[place]
            tensor.copy_(total)

    def gather_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The numbers of all ranks, in rank order."""
        (row,) = zip(*self.gather([torch.tensor(numbers, dtype=torch.float64)]), strict=True)
        return cast("list[float]", torch.cat(row).tolist())

    def gather_states(self, state: Saved) -> list[Saved]:
        """State dicts of all ranks, in rank order, their tensors on the CPU."""
        if self.group is None:
            return [state]
        written, rows = io.BytesIO(), list[bytes](b"" for _ in range(self.count))
        torch.save(state, written)
        dist.all_gather_object(rows, written.getvalue(), group=self.group)
        return [torch.load(io.BytesIO(r), map_location="cpu", weights_only=True) for r in rows]


def exact_addend(grad: Tensor, scale: float, parts: int) -> Tensor:
    """A gradient rounded so that fp32 adds up those of all micro-batches exactly, in any order.

    With the unit u = UNIT scale, to the nearest multiple of u, ties to even, and at most
    u MOST / 2^ceil(log2(parts)) in magnitude. What is not finite stays.

    Args:
        grad: of one micro-batch, in any dtype; the result has it, too.
        scale: by which the loss was multiplied, a power of two.
        parts: micro-batches of a step, over all ranks.
    """
    unit, most = UNIT * scale, MOST / 2.0 ** math.ceil(math.log2(parts))
    counts = grad.float() / unit
    kept = counts.round().clamp(-most, most) * unit
    return torch.where(counts.isfinite(), kept, grad.float()).to(grad.dtype)
