"""Places of a parameter: in a flat buffer, and in the piece of it that a rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class FragmentAddress:
    """A run of elements.

    Attributes:
        numel: its length.
        start: the first one.
    """

    numel: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """The part of a parameter that lies in a partition.

    Attributes:
        in_param: its place in the flattened parameter.
        in_partition: its place in the partition.
    """

    in_param: FragmentAddress
    in_partition: FragmentAddress


def fragments_of(sizes: Iterable[tuple[str, int]], partition: range) -> dict[str, Fragment]:
    """Fragments by name, of parameters laid end to end; empty parameters lie nowhere.

    Args:
        sizes: name and number of elements, in order.
        partition: the elements of the flat buffer that it holds.

    >>> fragments_of([("a", 3), ("b", 3)], range(2, 4))["b"].in_partition
    FragmentAddress(numel=1, start=1)
    """
    found: dict[str, Fragment] = {}
    begin = 0
    for name, size in sizes:
        end = begin + size
        inside = range(max(begin, partition.start), min(end, partition.stop))
        if len(inside):
            found[name] = Fragment(
                in_param=FragmentAddress(len(inside), inside.start - begin),
                in_partition=FragmentAddress(len(inside), inside.start - partition.start),
            )
        begin = end
    return found


class Partition(Protocol):
    """One rank's part of a parameter group that is split over ranks.

    All parameters of the group lie end to end, padded with zeros to `partition_size * world`.
    """

    @property
    def params(self) -> Sequence[Tensor]:
        """The trained parameters, in order."""

    @property
    def names(self) -> Sequence[str]:
        """Their names."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the group; None for one rank."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""

    @property
    def world(self) -> int:
        """Their number."""

    @property
    def flat(self) -> Tensor:
        """The model weights, padding included, on the device that ranks communicate from."""

    @property
    def master(self) -> Tensor:
        """This rank's fp32 weights, 1-D."""

    @property
    def fragments(self) -> Mapping[str, Fragment]:
        """By name, what of the parameters lies in the partition."""

    @property
    def expert(self) -> str | None:
        """Name of the expert group, or None."""

    @property
    def partition_size(self) -> int:
        """Elements of the partition."""

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""

    def gradients(self) -> list[Tensor]:
        """Accumulated gradients of the parameters: 1-D views, in order."""

    @property
    def padding(self) -> int:
        """Elements of the partition that belong to no parameter."""
