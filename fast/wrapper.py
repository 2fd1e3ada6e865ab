"""A `torch.optim.Optimizer` whose groups and state are those of another one, on master weights.

Schedulers, step hooks and whatever else takes an optimizer take it. The optimizer inside keeps
hyper-parameters and state; where kernels do all of its `step` in one pass, that is not called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

from twinstep.fast.control import ParamGroup
from twinstep.fast.moments import StateDict
from twinstep.fast.tables import FixedLists

State = dict[str, Tensor]


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


class Wrapper(torch.optim.Optimizer):
    """An optimizer around a fresh one.

    Args:
        inside: without state; its parameters become master weights.
        timers: called by phase, or None.

    Raises:
        ValueError: it has state.
    """

    _inside: torch.optim.Optimizer | None = None

    def __init__(self, inside: torch.optim.Optimizer, timers: Timers | None = None) -> None:
        if inside.state:
            raise ValueError(
                f"init_optimizer has state of {len(inside.state)} parameters, but should be "
                f"fresh: its parameters become master weights [{type(self).__name__}]"
            )
        # State that a step has written, as far as the host knows; see `_settle`.
        self._pending: dict[Tensor, State] = {}
        self._fixed: defaultdict[int, FixedLists] = defaultdict(FixedLists)  # by group
        params = [param for group in inside.param_groups for param in group["params"]]
        super().__init__(params, inside.defaults)
        self._inside = inside
        self.timers = timers

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside; waits for the device as `state` does."""
        self._settle()
        return self._held()

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of the optimizer inside, whose parameters are masters."""
        return [] if self._inside is None else self._inside.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        # torch's constructor assigns before there is anything inside.
        if self._inside is not None:
            self._inside.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """State of the optimizer inside, by master.

        Once after a first step this waits for the device: state appears with a step that was
        taken, and whether one was skipped only the device knows.
        """
        self._settle()
        return defaultdict(dict) if self._inside is None else self._inside.state

    @state.setter
    def state(self, state: defaultdict[Tensor, State]) -> None:
        if self._inside is not None:
            self._inside.state = state

    def _held(self) -> torch.optim.Optimizer:
        assert self._inside is not None
        return self._inside

    def _state_to_step(self, master: Tensor) -> State:
        """The state that kernels write; new where there is none. Nothing waits."""
        known = self._held().state.get(master) or self._pending.get(master)
        if not known:
            step = torch.zeros((), dtype=torch.int64, device=master.device)
            known = {"step": step, "exp_avg": torch.zeros_like(master, requires_grad=False)}
            known["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
            self._pending[master] = known
        return known

    def _settle(self) -> None:
        """Hand over the state of masters that have been stepped."""
        for master, state in list(self._pending.items()):
            if int(state["step"]) > 0:
                self._held().state[master] = self._pending.pop(master)

    def _load_inside(self, state_dict: StateDict) -> None:
        """Load the optimizer inside; nothing remains of the state that was there."""
        self._held().load_state_dict(state_dict)
        self._pending.clear()
        self._fixed.clear()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refused: masters are laid out at construction."""
        if self._inside is not None:
            raise RuntimeError(
                "a group was added, but all should be there at construction, when masters are "
                f"laid out [{type(self).__name__}]"
            )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return cast(float, self.param_groups[0]["lr"])

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self._inside!r}"

    def _refuse(self, closure: object) -> None:
        if closure is not None:
            raise RuntimeError(
                "a closure was given, but should not be: it would run backward without the loss "
                f"scale, and a skipped step could not take it back [{type(self).__name__}.step]"
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timer = None if self.timers is None else self.timers(name)
        if timer is not None:
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.stop()

    def _bytes(self, **tensors: Iterable[Tensor | None]) -> dict[str, int]:
        """Bytes by kind, the state inside being one."""
        inside = [value for held in self.state.values() for value in held.values()]
        return {
            kind: sum(tensor.nbytes for tensor in held if tensor is not None)
            for kind, held in {**tensors, "optimizer_state": inside}.items()
        }


def drop_gradients(params: Iterable[Tensor], *, set_to_none: bool) -> None:
    """Drop the gradients of these parameters, or write zeros into them."""
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            # With `create_graph` a gradient has a graph of its own. One that is a view has none.
            graph_free = param.grad.detach_() if param.grad.grad_fn is not None else param.grad
            graph_free.requires_grad_(False).zero_()
