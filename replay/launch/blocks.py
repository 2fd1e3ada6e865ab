"""Blocks of a large grid that run, where not all of them do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.lanes import Place

PLANE = 65_535
"""Most blocks of a grid along y and z; launchers fold longer rows of blocks into lines of it."""


def near_ends(grid: Place, count: int, and_middle: bool) -> Array:
    """Linear indices of the blocks within `count` of an end, or of the middle, along every axis.

    A grid of tensors and blocks has the ends of its tensors there. Blocks in one long row that was
    folded into a plane end anywhere in the last line of it, which then is at most `PLANE` long; the
    middle of the row is in one of the two lines about the middle.
    """
    near = [_near(n, count, and_middle) for n in grid]
    lines = [[near[0], near[1], near[2]]]
    for axis, other in ((0, 1), (1, 0)):
        if grid[axis] <= PLANE + 1 and (last := grid[other] - 1) > 0:
            line = [*near]
            line[axis] = np.arange(grid[axis])
            line[other] = np.unique([last // 2, (last + 1) // 2, last] if and_middle else [last])
            lines.append(line)
    chosen = [((z[:, None, None] * grid[1] + y[:, None]) * grid[0] + x) for x, y, z in lines]
    return np.unique(np.concatenate([linear.reshape(-1) for linear in chosen]))


def parts(count: int, room: int, shares: Sequence[tuple[float, float]]) -> Iterator[Array]:
    """Indices of the blocks of parts of a row of `count`, and of `room` more on either side.

    Args:
        count: blocks of the row.
        room: blocks.
        shares: where each part starts and stops, from 0 to 1.
    """
    for start, stop in shares:
        first, last = int(start * count) - room, int(stop * count) + room
        yield np.arange(max(0, first), min(count, last + 1))


def _near(length: int, count: int, and_middle: bool) -> Array:
    """Places within `count` of an end of an axis, or of its middle."""
    places = np.arange(length)
    near = (places < count) | (places >= length - count)
    middle = length // 2
    return places[near | (and_middle & (places >= middle - count) & (places < middle + count))]
