"""What every mixed-precision optimizer has: another optimizer inside, on the master weights.

The wrapper is a `torch.optim.Optimizer` itself, so that schedulers and step hooks take it. Its
`param_groups` and `state` are those of the optimizer inside, whose parameters are the masters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

ParamGroup = dict[str, object]


class Timer(Protocol):
    """What a timer has to offer."""

    def start(self) -> None:
        """Begin a phase."""

    def stop(self) -> None:
        """End it."""


class Timers(Protocol):
    """Timers by name, and a report of some of them."""

    def __call__(self, name: str) -> Timer:
        """The timer of that name."""

    def log(self, names: list[str]) -> None:
        """Report these."""


class _Nothing:
    """Stands in for the optimizer inside while torch's constructor assigns to it."""

    state: object = None
    param_groups: list[ParamGroup] = []


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one.

    Args:
        optimizer: fresh, without state; its groups are rewritten by the class that derives.
        timers: called by phase, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, timers: Timers | None) -> None:
        name = type(self).__name__
        if optimizer.state:
            raise ValueError(
                f"optimizer has state of {len(optimizer.state)} parameters, but should be fresh: "
                f"its parameters become master weights [{name}]"
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.optimizer = cast(torch.optim.Optimizer, _Nothing())
        super().__init__(params, optimizer.defaults)
        self.optimizer = optimizer
        self.timers = timers

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of the optimizer inside, whose parameters are masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, dict[str, object]]:
        """State of the optimizer inside, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, dict[str, object]]) -> None:
        self.optimizer.state = state

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refused: masters are laid out at construction."""
        if not isinstance(self.optimizer, _Nothing):
            raise RuntimeError(
                f"a group was added, but all groups should be there at construction, when their "
                f"masters are laid out [{type(self).__name__}]"
            )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return cast(float, self.param_groups[0]["lr"])

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self.optimizer!r}"

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self.timers is None:
            yield
            return
        timer = self.timers(name)
        timer.start()
        try:
            yield
        finally:
            # A phase that fails has ended, too.
            timer.stop()

    def _refuse(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise RuntimeError(
                f"a closure was given, but should not be: it would run backward without the loss "
                f"scale, and a skipped step could not take it back [{type(self).__name__}.step]"
            )

    def _report(self, **tensors: Iterable[Tensor | None]) -> dict[str, int]:
        """Bytes by kind; the state of the optimizer inside is a kind of its own."""
        inside = (value for held in self.state.values() for value in held.values())
        kinds = {**tensors, "optimizer_state": (t for t in inside if isinstance(t, Tensor))}
        return {
            kind: sum(t.numel() * t.element_size() for t in held if t is not None)
            for kind, held in kinds.items()
        }


def dropped(params: Iterable[Tensor], *, set_to_none: bool = True) -> None:
    """Drop the gradients of these parameters, or zero them."""
    for param in params:
        if set_to_none or param.grad is None:
            param.grad = None
            continue
        # A gradient may be a view, which cannot be detached in place.
        if param.grad.grad_fn is not None:
            param.grad.detach_()
        param.grad.requires_grad = False
        param.grad.zero_()


def check_dense(params: Iterable[Tensor], where: str) -> None:
    """Require dense gradients.

    Raises:
        RuntimeError: one is sparse.
    """
    for param in params:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"gradient has layout {param.grad.layout}, but should be dense [{where}]"
            )
