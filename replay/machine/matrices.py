"""ldmatrix and stmatrix: 8 x 8 matrices of 16-bit items between shared memory and a warp.

Lanes 8 i to 8 i + 7 name the rows of matrix i, 16 bytes each. Lane l holds the items in columns
2 (l mod 4) and the next of row l // 4, the lower one in the lower half of its register; with
`.trans` rows and columns change places.
"""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.machine.access import Site
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.ptx.syntax import Instruction

_LANE = np.arange(32)
_LINE, _PLACE = _LANE // 4, 2 * (_LANE % 4)


class MatrixSite:
    """One matrix instruction of one kernel.

    Attributes:
        count: Matrices moved: 1, 2 or 4.
        transposed: Whether rows and columns change places.
    """

    def __init__(self, instruction: Instruction, kind: str, count: int, offset: int) -> None:
        self.count = count
        self.transposed = "trans" in instruction.parts
        self.offset = offset
        self._item = Site(instruction, kind, "shared", 2, 1, 0)

    def load(self, lanes: Lanes, address: Array, guard: Array | None) -> tuple[Array, ...]:
        """One uint32 register for each matrix."""
        results = []
        for low, high in places_of_items(lanes, address, self.count, self.transposed, self.offset):
            items = [
                self._item.load(lanes, place, guard, (np.zeros((1, 1), np.uint16),))[0]
                for place in (low, high)
            ]
            results.append(_joined(*items))
        return tuple(results)

    def store(
        self, lanes: Lanes, address: Array, guard: Array | None, values: tuple[Array, ...]
    ) -> None:
        """Write one register for each matrix."""
        for (low, high), value in zip(
            places_of_items(lanes, address, self.count, self.transposed, self.offset),
            values,
            strict=True,
        ):
            self._item.store(lanes, low, guard, (value.astype(np.uint16),))
            self._item.store(lanes, high, guard, ((value >> np.uint32(16)).astype(np.uint16),))


def places_of_items(
    lanes: Lanes, address: Array, count: int, transposed: bool, offset: int
) -> list[tuple[Array, Array]]:
    """Addresses of every thread's two items, for each matrix."""
    rows = lanes.warps(stretched(address + address.dtype.type(offset), lanes.shape))
    places = []
    for matrix in range(count):
        starts = rows[..., 8 * matrix : 8 * matrix + 8]
        pair = []
        for next_item in (0, 1):
            line, item = _LINE, _PLACE + next_item
            if transposed:
                line, item = item, line
            place = starts[..., line] + (2 * item).astype(rows.dtype)
            pair.append(lanes.unwarp(np.ascontiguousarray(place)))
        places.append((pair[0], pair[1]))
    return places


def _joined(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
