"""FP16 optimizers with faults that some project shipped, as docs/reference/bugs.md tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.moments import StateDict
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.parallelism import SHARED, Gradients
from twinstep.fast.optimizers.scaled_wrapper import Given


class SaysItStepped(FP16Optimizer):
    """C14: tells nobody that a step was skipped."""

    @property
    def overflow(self) -> bool:
        """Never."""
        self._sync_state()
        return False


class ForgetsCounters(FP16Optimizer):
    """D07: of the scaler, restores the scale alone."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Go on counting from here."""
        before = self.loss_scaler.state_dict()
        super().load_state_dict(state_dict, load_optimizer_states)
        scale = self.loss_scaler.loss_scale
        self.loss_scaler.load_state_dict({**before, "cur_scale": scale})


class ForgetsTrackers(FP16Optimizer):
    """D17: restores neither what is left of the hysteresis nor what torch's rule counts."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Keep those of before."""
        before = self.loss_scaler.state_dict()
        super().load_state_dict(state_dict, load_optimizer_states)
        kept = {name: before[name] for name in {"cur_hysteresis", "growth_tracker"} & before.keys()}
        self.loss_scaler.load_state_dict({**self.loss_scaler.state_dict(), **kept})


class LoadMovesTheScale(FP16Optimizer):
    """D08: a load ends in a step that the scaler counts."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Count it."""
        super().load_state_dict(state_dict, load_optimizer_states)
        self.loss_scaler.update_scale(False)


class BackwardMovesTheScale(FP16Optimizer):
    """D22: every micro-batch of a step may have another scale."""

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Count a clean step."""
        super().backward(loss, create_graph, retain_graph)
        self.loss_scaler.update_scale(False)


class LastBackwardCounts(FP16Optimizer):
    """G16: of several backwards in one step, keeps the last."""

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Begin anew."""
        self.zero_grad()
        super().backward(loss, create_graph, retain_graph)


class ScalesWithoutNeed(FP16Optimizer):
    """D23: scales the loss of a bf16 model as well."""

    def __init__(
        self, inside: torch.optim.Optimizer, *, compat: Compat = CORRECT, **named: Any
    ) -> None:
        super().__init__(inside, compat=compat, **{**named, "low_precision_dtype": torch.float16})


class NormOfTheFirstBackward(FP16Optimizer):
    """E20: takes the norm before the last micro-batch has been accumulated."""

    own = ("_first",)
    _first: list[Tensor | None] | None = None

    def backward(
        self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False
    ) -> None:
        """Keep what there is after the first one."""
        super().backward(loss, create_graph, retain_graph)
        if self._first is None:
            grads = [param.grad for param in self._params()]
            self._first = [None if grad is None else grad.clone() for grad in grads]

    def _read(self, groups: Sequence[Sequence[Tensor]]) -> tuple[Gradients, Given]:
        found, given = super()._read(groups)
        first, self._first = self._first, None
        if first is not None:
            counted = [grad for grad in first if grad is not None]
            found = self._parallelism.gradients({SHARED: counted})
        return found, given


class EditsDeadGroups(FP16Optimizer):
    """H05: after a load, hands out the groups that the optimizer inside had before."""

    own = ("_dead",)
    _dead: list[dict[str, object]] | None = None

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Keep the old list."""
        before = self._held().param_groups
        super().load_state_dict(state_dict, load_optimizer_states)
        self._dead = before

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The dead ones, once there are some."""
        return self._dead if self._dead is not None else super().param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, object]]) -> None:
        # torch's constructor assigns before there is anything inside.
        if self._inner is not None:
            self._inner.param_groups = groups


class ClipsAsConstructed(FP16UnfusedOptimizer):
    """H19: the largest norm is not restored."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Keep that of the constructor."""
        before = self.clip_grad
        super().load_state_dict(state_dict, load_optimizer_states)
        self.clip_grad = before


UPSTREAM: tuple[type[torch.optim.Optimizer], ...] = (
    SaysItStepped,
    ForgetsCounters,
    ForgetsTrackers,
    LoadMovesTheScale,
    BackwardMovesTheScale,
    LastBackwardCounts,
    ScalesWithoutNeed,
    NormOfTheFirstBackward,
    EditsDeadGroups,
    ClipsAsConstructed,
)
