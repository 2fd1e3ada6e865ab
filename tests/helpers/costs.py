"""Costs of a step that tests count: operators of torch, reads by the host, compilations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# These compute nothing.
VIEWS = {"detach", "slice", "view", "split_with_sizes"}
READS = {"_local_scalar_dense", "nonzero", "_to_copy"}


class Operators(TorchDispatchMode):
    """Operators of torch that ran inside.

    Attributes:
        large: names of those with a tensor of at least `least` elements, `besides` left out.
        waits: names of those for which the host waits.
    """

    def __init__(self, least: int, besides: Collection[str] = VIEWS) -> None:
        super().__init__()
        self.least, self.besides = least, besides
        self.large: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        """Run the operator and note it."""
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        if name not in self.besides and any(tensor.numel() >= self.least for tensor in tensors):
            self.large.append(name)
        if name in READS:
            self.waits.append(name)
        return result


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled inside."""
    names: list[str] = []
    knobs = triton.knobs.compilation
    before = knobs.listener
    knobs.listener = lambda *, metadata, **_: names.append(metadata["name"])
    try:
        yield names
    finally:
        knobs.listener = before
