"""Partition arithmetic: which elements of a flat parameter group belong to which rank.

    A = 2 W                                   alignment
    N = ceil(n / A) A                         padded length
    P = N / W                                 length of a partition
    partition r = elements [r P, (r + 1) P)   of all parameters end to end, zeros after element n

n is the number of elements of all parameters of the group, W the number of ranks that share it.
Four parameters of 5, 3, 0 and 6 elements over W = 3 ranks have n = 14, A = 6, N = 18, P = 6:

    element     0              5  6     8           12    14          18
    parameter   |       0      |    1   |         3       |   padding |
    partition   |         0       |         1       |         2       |

Parameter 2, which is empty, lies at element 8. A parameter may lie in several partitions, and a
partition may hold nothing but padding. Everything is counted in elements, in whole numbers.

Source: Rajbhandari et al. (2020), section 5.1; alignment and order as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter of which something lies in a partition.

    Attributes:
        index: of the parameter, in the order in which they lie.
        in_param: first element of it that the partition holds.
        in_partition: place of that element in the partition.
        numel: elements of it in the partition; 0 for a parameter that has none.
    """

    index: int
    in_param: int
    in_partition: int
    numel: int


def alignment(world: int) -> int:
    """A = 2 W: every partition has an even number of elements, 4 bytes in a 16-bit dtype."""
    return 2 * world


def padded_numel(numel: int, world: int) -> int:
    """N = ceil(n / A) A, the smallest multiple of the alignment that holds all elements."""
    return -(-numel // alignment(world)) * alignment(world)


def partition_size(numel: int, world: int) -> int:
    """P = N / W, without a remainder."""
    return padded_numel(numel, world) // world


def partition_bounds(numel: int, world: int, rank: int) -> tuple[int, int]:
    """First element of a partition, r P, and the one after its last, (r + 1) P."""
    size = partition_size(numel, world)
    return rank * size, (rank + 1) * size


def padding(numel: int, world: int, rank: int) -> int:
    """Elements of a partition that belong to no parameter: min(P, max(0, (r + 1) P - n)).

    One element over 4 ranks: N = 8, P = 2, and the ranks have 1, 2, 2 and 2 elements of padding.
    """
    start, stop = partition_bounds(numel, world, rank)
    return min(stop - start, max(0, stop - numel))


def starts(sizes: Sequence[int]) -> list[int]:
    """First element of each parameter: c_i = s_0 + ... + s_(i-1)."""
    return list(accumulate(sizes, initial=0))[:-1]


def members(sizes: Sequence[int], world: int, rank: int) -> list[Member]:
    """Parameters in a partition, in order.

    A parameter of s elements from c on is a member of the partition [a, b) if its start lies
    inside, a <= c < b, or if it goes on into it, c < a < c + s. Then its elements
    [max(c, a) - c, min(c + s, b) - c) lie there, from max(c, a) - a on. An empty parameter is a
    member by its start alone, and of no partition where it comes after the last element.

    Args:
        sizes: numbers of elements, in the order in which the parameters lie.
        world: W.
        rank: r.
    """
    begin, end = partition_bounds(sum(sizes), world, rank)
    found = []
    for index, (start, size) in enumerate(zip(starts(sizes), sizes, strict=True)):
        if begin <= start < end or start < begin < start + size:
            first, stop = max(start, begin), min(start + size, end)
            found.append(
                Member(
                    index=index,
                    in_param=first - start,
                    in_partition=first - begin,
                    numel=stop - first,
                )
            )
    return found


def first_offset(sizes: Sequence[int], world: int, rank: int) -> int:
    """Elements of a partition's first parameter that lie in partitions before it: a - c, or 0."""
    inside = members(sizes, world, rank)
    return inside[0].in_param if inside else 0


def round_robin_order(count: int, world: int) -> list[int]:
    """Order of parameters under round robin: those with i mod W = 0, then 1, and so on.

    Neighbours in the model, whose gradients arrive one after the other, then lie about n / W
    elements apart, in partitions of different ranks. Element k of the result is the index of the
    parameter that lies at place k. Five parameters over two ranks: 0, 2, 4, 1, 3.
    """
    return [index for first in range(world) for index in range(first, count, world)]


def inverse_order(order: Sequence[int]) -> list[int]:
    """Place of each parameter: inverse[order[k]] = k."""
    places = [0] * len(order)
    for place, index in enumerate(order):
        places[index] = place
    return places
