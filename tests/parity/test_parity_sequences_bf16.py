"""BF16Optimizer under sequences of actions: ours passes, and what is wrong is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from tests.helpers.wrappers_driven import check_rejected, reached
from twinstep.fast.optimizers.bf16 import BF16Optimizer
from twinstep.fast.optimizers.group_tensors import GroupTensors


class KeepsGradients(BF16Optimizer):
    """Forgets to clear the accumulators after a step."""

    def clear_hp_grads(self) -> None:
        """Do nothing."""


class StateOnSkip(BF16Optimizer):
    """Shows state after a step that was skipped."""

    def _sync_state(self) -> None:
        self._held().state.update(self._pending)
        self._pending.clear()


class KeepsPending(BF16Optimizer):
    """Has its old state back after a state dict without one was loaded."""

    def _load_inner(self, state_dict: dict[str, object]) -> None:
        before = dict(self.state)
        super()._load_inner(state_dict)
        self._pending.update(before)


class ClipsOnce(BF16Optimizer):
    """Does not round clipped gradients to the accumulators' dtype."""

    def _clipped_apart(self) -> list[Tensor]:
        return []

    def _group_tensors(self) -> list[GroupTensors]:
        """Let the update read fp32 copies, so that it clips by itself."""
        found = []
        for group, given in zip(self.groups, super()._group_tensors(), strict=True):
            copied = [group.own(group.accumulator).float()]
            masters, _, *rest = given.lists
            found.append(replace(given, lists=[masters, copied, *rest]))
        return found


class CountsMissing(BF16Optimizer):
    """Believes that every parameter has a gradient once one has."""

    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Mark them all."""
        super().update_hp_grads(clear_lp_grads)
        for group in self.groups:
            group.has_gradient = [any(group.has_gradient)] * len(group.params)


class OldMasters(BF16Optimizer):
    """Leaves the masters when weights were loaded into the model."""

    def refresh_fp32_params(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "cls", [KeepsGradients, StateOnSkip, KeepsPending, ClipsOnce, CountsMissing, OldMasters]
)
def test_a_wrong_optimizer_is_rejected(cls: type[BF16Optimizer]) -> None:
    check_rejected(cls, "bf16", sequences=150, seed=1)


def test_sequences_reach_every_action_and_are_rarely_refused() -> None:
    names, raised, skipped = reached("BF16Optimizer")
    always = {"add_group", "add_group_again", "step_with_closure"}
    wrong = {"construct_wrongly", "load_damaged", "load_universal"}
    wrong |= {"copy"}  # of gradients with a graph
    # A sparse gradient is refused where it is accumulated.
    assert raised.keys() <= {*always, *wrong, "whole", "set_whole", "backward", "train"} | {
        *("update_hp_grads", "step")
    }
    # Gradients that nothing has accumulated.
    assert raised["step"] < names["step"] / 4
    assert all(raised[name] == names[name] for name in always)
    assert raised["whole"] < names["whole"]
    assert skipped >= 5
