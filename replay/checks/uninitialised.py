"""Bytes that were never written."""

from __future__ import annotations

import numpy as np
import torch

from twinstep.replay.dtypes import Array
from twinstep.replay.machine.memory import span


class Unwritten:
    """Bytes of tensors not yet written; lives across the launches of a context."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.keepers = tensors
        self.spans = [
            (t.data_ptr(), t.data_ptr() + span(t), np.zeros(span(t), np.bool_)) for t in tensors
        ]

    def write(self, addresses: Array) -> None:
        """These bytes are written."""
        for start, end, written in self.spans:
            inside = (addresses >= start) & (addresses < end)
            written[addresses[inside] - start] = True

    def unread(self, addresses: Array) -> Array:
        """Flags of the bytes that were never written."""
        missing = np.zeros(addresses.shape, np.bool_)
        for start, end, written in self.spans:
            inside = (addresses >= start) & (addresses < end)
            missing[inside] = ~written[addresses[inside] - start]
        return missing
