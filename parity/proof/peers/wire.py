"""Collectives of a process, counted where DeepSpeed and we call them: as functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

# By name, parts of its input that each of two ranks sends, by the algorithm that sends least; and
# where the input is. Of a reduction to one rank, or a scattered one, nothing is sent twice.
SHARES = {
    "all_reduce": (1.0, 0),
    "reduce": (0.5, 0),
    "reduce_scatter_tensor": (0.5, 1),
    "reduce_scatter_single": (0.5, 1),
    "all_gather_into_tensor": (1.0, 1),
    "all_gather_single": (1.0, 1),
    "broadcast": (0.5, 0),
}
INPUTS = ("tensor", "input", "input_tensor")


@dataclass
class Wire:
    """Counts of collectives since they were last cleared.

    Attributes:
        calls: dtype of what is sent, and bytes that the average of two ranks sends, in order.
    """

    calls: list[tuple[torch.dtype, float]] = field(default_factory=list)

    def install(self) -> None:
        """Count from here on; DeepSpeed keeps some of the functions when it is imported."""
        for name, (share, place) in SHARES.items():
            if hasattr(dist, name):
                setattr(dist, name, self._counted(getattr(dist, name), share, place))

    def _counted(
        self, call: Callable[..., object], share: float, place: int
    ) -> Callable[..., object]:
        @wraps(call)
        def counted(*args: object, **kwargs: object) -> object:
            given = next((kwargs[key] for key in INPUTS if key in kwargs), None)
            tensor = cast(Tensor, args[place] if given is None else given)
            self.calls.append((tensor.dtype, share * tensor.numel() * tensor.element_size()))
            return call(*args, **kwargs)

        return counted
