"""Parameters read at an address that is computed: arrays within a structure passed by value."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array, stretched
from twinstep.replay.errors import Misaligned, OutOfBounds
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.ptx.syntax import Instruction


class ParameterSite:
    """One `ld.param` through a register.

    Args:
        size: Bytes of one word.
        count: Words per thread.
    """

    def __init__(self, instruction: Instruction, size: int, count: int) -> None:
        self.instruction = instruction
        self.size = size
        self.count = count

    def load(self, lanes: Lanes, address: Array, guard: Array | None) -> tuple[Array, ...]:
        """The words at each thread's address, zero where the guard is false.

        Raises:
            OutOfBounds: outside the parameters.
            Misaligned: at an address that is no multiple of the access.
        """
        data = np.frombuffer(lanes.batch.params, np.uint8)
        at, bytes_ = address.view(np.int64), self.size * self.count
        if guard is not None:
            at = np.where(guard, at, 0)
        for wrong, error in (
            ((at < 0) | (at + bytes_ > len(data)), OutOfBounds),
            (at % bytes_ != 0, Misaligned),
        ):
            if wrong.any():
                offset = int(stretched(at, lanes.shape)[stretched(wrong, lanes.shape)][0])
                raise error(
                    f"parameter read of {bytes_} bytes at offset {offset} of {len(data)}; kernel "
                    f"{lanes.batch.kernel}, {self.instruction.place}, `{self.instruction.text}`."
                )
        word = np.dtype(f"u{self.size}")
        found = data[at[..., None] + np.arange(bytes_)].view(word)
        return tuple(np.ascontiguousarray(found[..., k]) for k in range(self.count))
