"""Blocks of a grid: what a GPU launches, and which of them run where not all do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.errors import ReplayError
from twinstep.replay.machine.lanes import Place

PLANE, ROW = 65_535, 2**31 - 1
"""Most blocks of a grid along y and z, and along x; launchers fold longer rows into lines."""

THREADS, STATIC, SHARED = 1024, 48 << 10, 227 << 10
"""Most threads of a block, and bytes of shared memory: of a fixed size, and with dynamic ones."""


def require_launchable(kernel: str, grid: Place, block: Place, static: int, dynamic: int) -> None:
    """Refuse what no GPU launches.

    Args:
        kernel: its name.
        grid: blocks along each axis.
        block: threads of each along each axis.
        static: bytes of shared memory of a fixed size.
        dynamic: further ones.

    Raises:
        ReplayError: the grid or the block is empty or too large, or takes too much shared memory.
    """
    for what, unit, (x, y, z), most, in_all in (
        ("a grid of", "blocks", grid, (ROW, PLANE, PLANE), math.inf),
        ("blocks of", "threads", block, (THREADS, THREADS, 64), THREADS),
    ):
        given = f"Kernel {kernel} has {what} {x:,} x {y:,} x {z:,} {unit}, but a GPU takes"
        if min(x, y, z) < 1:
            raise ReplayError(f"{given} none that is empty.")
        if x > most[0] or max(y, z) > most[1] or z > most[2]:
            raise ReplayError(f"{given} at most {most[0]:,} x {most[1]:,} x {most[2]:,}.")
        if x * y * z > in_all:
            raise ReplayError(f"{given} at most {in_all:,}.")
    given = f"Kernel {kernel} has {static:,}"
    if static > STATIC:
        words = "bytes of static shared memory, but a GPU takes at most"
        raise ReplayError(f"{given} {words} {STATIC:,}.")
    if not 0 <= dynamic <= SHARED - static:
        words = "bytes of shared memory, static and dynamic, but a GPU takes at most"
        raise ReplayError(f"{given} + {dynamic:,} {words} {SHARED:,}.")


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
