"""Buckets: runs of neighbours in the flat layout of a group, cut from its end to its beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from twinstep.fast.optimizers.zero_groups import ZeroGroup


@dataclass(eq=False)
class Bucket:
    """A run of parameters.

    Attributes:
        group: whose they are.
        params: in the order in which they lie.
        begin: first element in the flat layout.
        end: the one after the last; of the whole of a group, padding included.
        arrived: places of the parameters whose gradients backward has finished in this round.
    """

    group: ZeroGroup
    params: Sequence[Tensor]
    begin: int
    end: int
    arrived: set[int] = field(default_factory=set)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.end - self.begin

    @property
    def whole(self) -> bool:
        """True if all of the group is in it."""
        return self.numel == self.group.flat.numel()

    @property
    def complete(self) -> bool:
        """True if all gradients have arrived."""
        return len(self.arrived) == len(self.params)

    def owned(self) -> Iterator[tuple[int, int, int]]:
        """Ranks that own elements of it, each with its first element in the bucket and the end."""
        size = self.group.partition_size
        for rank in range(self.group.world):
            first, stop = max(rank * size, self.begin), min((rank + 1) * size, self.end)
            if first < stop:
                yield rank, first - self.begin, stop - self.begin


def cut(group: ZeroGroup, limit: int) -> list[Bucket]:
    """Buckets of a group, from its end to its beginning.

    Args:
        group: as laid out.
        limit: largest number of elements; a longer parameter is a bucket of its own.
    """
    found: list[Bucket] = []
    begin = end = group.numel
    params: list[Tensor] = []
    for param in reversed(group.params):
        if params and end - begin + param.numel() > limit:
            found.append(Bucket(group, params[::-1], begin, end))
            end, params = begin, []
        params.append(param)
        begin -= param.numel()
    if not found:
        end = group.flat.numel()
    return [*found, Bucket(group, params[::-1], begin, end)] if params else []
