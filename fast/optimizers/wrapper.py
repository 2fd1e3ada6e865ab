"""The wrapper of `contract.wrapper` around an optimizer whose state only the device knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

import twinstep.contract.wrapper
from twinstep.contract.moments import StateDict, new_state
from twinstep.contract.timers import Timers
from twinstep.contract.wrapper import State, refuse_named_state
from twinstep.fast.optimizers.driver import StepDriver
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.plan import GroupPlan
from twinstep.fast.runtime.checks import require_not_captured
from twinstep.fast.runtime.lists import FixedLists

_CORRECTION: Callable[[Mapping[str, object]], object] = itemgetter("bias_correction")


class Wrapper(twinstep.contract.wrapper.Wrapper):
    """An optimizer around a fresh one; where kernels do all of its `step`, that is not called."""

    _step: StepDriver

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        timers: Timers | None = None,
        *,
        split: bool = False,
    ) -> None:
        # State that a step has written, as far as the host knows; see `_sync_state`.
        self._pending: dict[Tensor, State] = {}
        self._fixed: defaultdict[int, FixedLists] = defaultdict(FixedLists)  # by group
        self._group_plan: GroupPlan | None = None
        super().__init__(optimizer, timers, split=split)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer; waits for the device as `state` does."""
        self._sync_state()
        return self._held()

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """State of the inner optimizer, by master.

        Once after a first step this waits for the device: state appears with a step that was
        taken, and whether one was skipped only the device knows.
        """
        refuse_named_state(type(self).__name__)
        self._sync_state()
        return defaultdict(dict) if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, State]) -> None:
        if self._inner is not None:
            self._inner.state = state

    def _state_to_step(self, master: Tensor) -> State:
        """The state that kernels write; new where there is none. Nothing waits."""
        known = self._held().state.get(master) or self._pending.get(master)
        if not known:
            require_not_captured(type(self).__name__, master.device)
            known = self._pending[master] = new_state(master)
        return known

    def _states(self) -> tuple[Mapping[Tensor, State], Mapping[Tensor, State]]:
        """State that the inner optimizer has, and state that steps have written since."""
        return self._held().state, self._pending

    def _groups_laid_out(
        self,
        gradients: object,
        placed: Sequence[Sequence[Tensor]],
        make: Callable[[], list[GroupTensors]],
    ) -> list[GroupTensors]:
        """What `make` returns for the kernels, made anew where it may differ; see `GroupPlan`.

        Args:
            gradients: what reads the gradients; None where they are those of one step.
            placed: as of `GroupPlan`.
            make: returns all groups.
        """
        if gradients is None:
            return make()
        held, corrections = self._group_plan, list(map(_CORRECTION, self.param_groups))
        if held is None or not held.holds(gradients, placed, self._states(), corrections):
            groups = make()
            held = GroupPlan(gradients, groups, placed, self._states(), corrections)
            self._group_plan = held
        return held.groups

    def _sync_state(self) -> None:
        """Hand over the state of masters that have been stepped."""
        for master, state in list(self._pending.items()):
            if int(state["step"]) > 0:
                self._held().state[master] = self._pending.pop(master)

    def _load_inner(self, state_dict: StateDict) -> None:
        """Load the inner optimizer; nothing remains of the state that was there."""
        self._held().load_state_dict(state_dict)
        self._pending.clear()
        self._fixed.clear()
        self._group_plan = None
        self._step.forget()
