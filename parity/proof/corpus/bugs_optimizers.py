"""Real defects that are planted as whole optimizer classes: one step does not show them."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from twinstep.parity.proof.corpus import wrong_optimizers as shelf
from twinstep.parity.proof.corpus.optimizers import Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup


class OneLearningRateForAll(FusedAdam):
    """Reads the learning rate of the first group for every group."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group({**group, "lr": self.param_groups[0]["lr"]}, params)


class FrozenWeightsDecay(FusedAdam):
    """Decays weights that have no gradient along with those of their group that have one."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params)
        shrink = 1.0 - cast(float, group["lr"]) * cast(float, group["weight_decay"])
        for param in cast(list[Tensor], group["params"]):
            if param.grad is None:
                param.data.mul_(shrink)


class LoadChangesTheCounter(FusedAdam):
    """Holds counters as another type after a load."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Change them."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].float()


class LoadsWhatHasState(FusedAdam):
    """Loads state into what has state; before the first step nothing has."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Drop what is new."""
        known = {param for param, state in self.state.items() if state}
        super().load_state_dict(state_dict)
        for param in [param for param in self.state if param not in known]:
            del self.state[param]


PLANTED: dict[str, type] = {
    "A32": FrozenWeightsDecay,
    "A34": OneLearningRateForAll,
    "A46": shelf.CountsWithoutGradient,
    "B16": shelf.FirstGroupsDecay,
    "H01": shelf.LosesCounterOnLoad,
    "H04": shelf.LosesMomentsOnLoad,
    "H10": LoadChangesTheCounter,
    "H11": LoadsWhatHasState,
}
UPSTREAM_OPTIMIZERS = tuple(
    Optimizer(cls=cls, says=str(cls.__doc__))
    for cls in (OneLearningRateForAll, FrozenWeightsDecay, LoadChangesTheCounter, LoadsWhatHasState)
)
