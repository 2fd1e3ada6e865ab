"""Bytes that were never written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from twinstep.replay.dtypes import Array
from twinstep.replay.errors import UninitialisedRead
from twinstep.replay.machine.memory import span

FIRST = 8
"""Reads that are noted where they are no errors."""


class Unwritten:
    """Bytes of tensors not yet written; lives across the launches of a context.

    Args:
        tensors: Hold nothing yet.
        raises: Whether a read is an error; otherwise it is added to `reads`.

    Attributes:
        reads: A sentence for each of the first reads, where they are no errors.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), *, raises: bool = True) -> None:
        self.raises = raises
        self.reads: list[str] = []
        self._held: list[tuple[torch.Tensor, int, Array]] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """A tensor holds nothing yet either; it is kept alive."""
        self._held.append((tensor, tensor.data_ptr(), np.zeros(span(tensor), np.bool_)))

    def written(self, tensor: torch.Tensor) -> None:
        """Something else than a launch has written a tensor, perhaps all of it."""
        start = tensor.data_ptr()
        for _, first, flags in self._held:
            flags[max(start - first, 0) : max(start + span(tensor) - first, 0)] = True

    def write(self, addresses: Array) -> None:
        """These bytes are written."""
        for start, flags, inside in self._reached(addresses):
            flags[addresses[inside] - start] = True

    def unread(self, addresses: Array) -> Array:
        """Flags of the bytes that were never written."""
        missing = np.zeros(addresses.shape, np.bool_)
        for start, flags, inside in self._reached(addresses):
            missing[inside] = ~flags[addresses[inside] - start]
        return missing

    def _reached(self, addresses: Array) -> Iterable[tuple[int, Array, Array]]:
        low, high = int(addresses.min(initial=0)), int(addresses.max(initial=0))
        for _, start, flags in self._held:
            if start <= high and low < start + len(flags):
                yield start, flags, (addresses >= start) & (addresses < start + len(flags))

    def report(self, says: str) -> None:
        """Something was read that nothing has written.

        Raises:
            UninitialisedRead: if that is an error.
        """
        if self.raises:
            raise UninitialisedRead(f"{says}.")
        if len(self.reads) < FIRST:
            self.reads.append(says)
