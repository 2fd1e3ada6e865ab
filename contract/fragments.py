"""Places of a parameter: in a flat buffer, and in the piece of it that a rank owns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
