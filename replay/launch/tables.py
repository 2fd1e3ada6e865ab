"""Tables of addresses: tensors that a launch reaches through the elements of an argument."""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from twinstep.replay.launch.options import Labelled
from twinstep.replay.machine.memory import span

WORDS = (torch.int64, torch.uint64)
LONGEST = 1 << 20
"""Elements above which an argument is no table."""
LOWEST = 1 << 20
"""Address below which this machine has no tensor: an ordinary number is not looked up."""


def listed(tables: Sequence[Labelled], known: Sequence[Labelled]) -> list[Labelled]:
    """Tensors of this process that addresses among the integers of tables lead to.

    Args:
        tables: Arguments that addresses are loaded from.
        known: Tensors within its reach already.
    """
    asked: dict[int, str] = {}
    for label, tensor in tables:
        if tensor.dtype in WORDS and 0 < tensor.numel() <= LONGEST:
            words = np.unique(tensor.detach().reshape(-1).view(torch.int64).numpy())
            asked |= dict.fromkeys(words[words >= LOWEST].tolist(), label)
    if asked:
        near = [tensor for _, tensor in known if tensor.numel()]
        asked = {word: asked[word] for word in sorted(asked.keys() - _reached(asked, near).keys())}
    if not asked:
        return []
    found = _reached(asked, _live())
    return [
        (f"{asked[word]}[...]", tensor) for word, tensors in found.items() for tensor in tensors
    ]


def _reached(
    addresses: Iterable[int], tensors: Iterable[torch.Tensor]
) -> dict[int, list[torch.Tensor]]:
    """Addresses that lie in tensors, and those tensors."""
    ordered = sorted(addresses)
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        start = tensor.data_ptr()
        for place in range(bisect_left(ordered, start), bisect_left(ordered, start + span(tensor))):
            found.setdefault(ordered[place], []).append(tensor)
    return found


def _live() -> list[torch.Tensor]:
    """Tensors in the CPU's memory that Python holds."""
    found = []
    for value in gc.get_objects():
        # Asking an object for its class may run its code, asking for its type does not.
        if issubclass(type(value), torch.Tensor):
            with contextlib.suppress(Exception):
                if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
                    value.data_ptr()
                    found.append(value)
    return found
