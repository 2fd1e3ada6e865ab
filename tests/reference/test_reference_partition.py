"""Partition arithmetic against an oracle that lays elements down one by one."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.profile import LONG
from twinstep.contract.fragments import fragments_of
from twinstep.reference.partition import (
    Member,
    alignment,
    first_offset,
    inverse_order,
    members,
    padded_numel,
    padding,
    partition_bounds,
    partition_size,
    round_robin_order,
    starts,
)

Element = tuple[int, int]
SIZES = st.lists(st.integers(0, 9) | st.integers(10, 40), max_size=7)
WORLDS = st.integers(1, 9)


def dealt(sizes: list[int], world: int) -> list[list[Element | None]]:
    """Partitions as lists of elements: (parameter, number), or None for padding."""
    laid: list[Element | None] = [
        (index, number) for index, size in enumerate(sizes) for number in range(size)
    ]
    # One rank after the other gets two more elements until there is room for all.
    room = 0
    while room * world < len(laid):
        room += 2
    laid += [None] * (room * world - len(laid))
    return [[laid.pop(0) for _ in range(room)] for _ in range(world)]


def held(cell: list[Element | None], index: int) -> list[tuple[int, int]]:
    """Places in a partition and numbers of the elements of one parameter."""
    return [(place, e[1]) for place, e in enumerate(cell) if e is not None and e[0] == index]


@settings(max_examples=2000 if LONG else 60)
@given(sizes=SIZES, world=WORLDS)
@example(sizes=[1], world=4)
@example(sizes=[], world=3)
@example(sizes=[0, 0], world=2)
@example(sizes=[0, 4, 3], world=2)
@example(sizes=[4, 3, 0], world=1)
@example(sizes=[2, 0, 2], world=2)
@example(sizes=[40, 1], world=8)
def test_partitions_are_those_of_elements_dealt_one_by_one(sizes: list[int], world: int) -> None:
    cells = dealt(sizes, world)
    numel = sum(sizes)
    assert padded_numel(numel, world) == sum(map(len, cells))
    assert padded_numel(numel, world) % alignment(world) == 0
    for rank, cell in enumerate(cells):
        assert partition_size(numel, world) == len(cell)
        bounds = (rank * len(cell), (rank + 1) * len(cell))
        assert partition_bounds(numel, world, rank) == bounds
        assert padding(numel, world, rank) == cell.count(None)
        inside = members(sizes, world, rank)
        by_index = {one.index: one for one in inside}
        assert list(by_index) == sorted(by_index)
        for index, size in enumerate(sizes):
            pairs = held(cell, index)
            member = by_index.get(index)
            if size:
                assert (member is not None) == bool(pairs)
            if pairs:
                assert member == Member(
                    index=index,
                    in_param=pairs[0][1],
                    in_partition=pairs[0][0],
                    numel=len(pairs),
                )
        first = [e for e in cell if e is not None][:1]
        leads = bool(inside) and inside[0].numel == 0
        assert first_offset(sizes, world, rank) == (first[0][1] if first and not leads else 0)


@settings(max_examples=2000 if LONG else 60)
@given(sizes=SIZES, world=WORLDS)
@example(sizes=[0, 4], world=1)
def test_an_empty_parameter_is_in_the_partition_of_the_element_after_it(
    sizes: list[int], world: int
) -> None:
    places = starts(sizes)
    whole = [e for cell in dealt(sizes, world) for e in cell]
    for index, size in enumerate(sizes):
        homes = [
            rank
            for rank in range(world)
            if index in [one.index for one in members(sizes, world, rank)]
        ]
        if size == 0:
            after = places[index] // max(partition_size(sum(sizes), world), 1)
            assert homes == ([after] if places[index] < len(whole) else [])


@settings(max_examples=1000 if LONG else 40)
@given(sizes=SIZES, world=WORLDS)
def test_fragments_are_the_members_that_have_elements(sizes: list[int], world: int) -> None:
    """The places that both sides and all checkpoints use."""
    named = [(f"p{index}", size) for index, size in enumerate(sizes)]
    for rank in range(world):
        found = {
            name: (fragment.in_param.start, fragment.in_partition.start, fragment.in_param.numel)
            for name, fragment in fragments_of(
                named, range(*partition_bounds(sum(sizes), world, rank))
            ).items()
        }
        assert found == {
            f"p{one.index}": (one.in_param, one.in_partition, one.numel)
            for one in members(sizes, world, rank)
            if one.numel
        }


@settings(max_examples=500 if LONG else 40)
@given(count=st.integers(0, 30), world=WORLDS)
def test_round_robin_deals_parameters_like_cards(count: int, world: int) -> None:
    hands: list[list[int]] = [[] for _ in range(world)]
    for index in range(count):
        hands[index % world].append(index)
    order = round_robin_order(count, world)
    assert order == [index for hand in hands for index in hand]
    back = inverse_order(order)
    assert [order[back[index]] for index in range(count)] == list(range(count))
    assert inverse_order(back) == order


@pytest.mark.parametrize(
    ("sizes", "paddings", "owned", "offsets"),
    [
        ([4, 3, 5], [0, 0], [[0, 1], [1, 2]], [0, 2]),
        ([3], [0, 1], [[0], [0]], [0, 2]),
        ([1], [1, 2], [[0], []], [0, 0]),
        ([7, 2], [0, 3], [[0], [0, 1]], [0, 6]),
    ],
)
def test_layouts_of_two_ranks_are_those_that_deepspeed_makes(
    sizes: list[int], paddings: list[int], owned: list[list[int]], offsets: list[int]
) -> None:
    """Edges Z-10 and Z-11: whole numbers, and padding that may lie on several ranks."""
    assert [padding(sum(sizes), 2, rank) for rank in range(2)] == paddings
    assert [[one.index for one in members(sizes, 2, rank)] for rank in range(2)] == owned
    assert [first_offset(sizes, 2, rank) for rank in range(2)] == offsets
    assert round_robin_order(3, 2) == [0, 2, 1]
