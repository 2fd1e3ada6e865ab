"""BF16Optimizer under sequences of actions: ours passes, and what is wrong is named."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from twinstep.fast.optimizers.bf16 import BF16Optimizer
from twinstep.fast.optimizers.driver import GroupTensors
from twinstep.parity.registry.engines import running
from twinstep.parity.sequences.bf16_rules import BF16Rules
from twinstep.parity.sequences.drive import Side, run, sequence
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.registry import Twin, borrowed_twins, register_optimizer, twins
from twinstep.reference.optimizers.bf16 import BF16Optimizer as Reference

ROOT = Path(__file__).resolve().parents[2]


def ours() -> Twin:
    """The twin as it is registered."""
    with borrowed_twins():
        register_our_optimizers()
        return next(twin for twin in twins() if twin.name == "fast.BF16Optimizer")


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

    def _group_tensors(self, index: int) -> GroupTensors:
        """Let the update read fp32 copies, so that it clips by itself."""
        group, given = self.groups[index], super()._group_tensors(index)
        masters, _, *rest = given.lists
        return replace(given, lists=[masters, [group.own(group.accumulator).float()], *rest])


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
    right = ours()
    with borrowed_twins() as found:
        register_optimizer(
            cls.__name__,
            reference="BF16Optimizer",
            arithmetic="exact",
            dtypes=("bf16",),
            private=right.private,
            engines=right.engines,
        )(cls)
    effort = TwinEffort(sequences=150, seed=1, repros=None, shrink_runs=0)
    cell = judge_twin(found[0], "bf16", twin_engine(found[0]), effort)
    assert "breaks `sequences`" in cell.failure
    assert "Error" not in cell.failure, f"rejected for the wrong reason: {cell.failure}"
    acts = sequence(right.rules, effort.seed, "bf16", cell.sequences - 1)
    with running(twin_engine(right)):
        assert run(right, "bf16", "cpu", acts) is None, "the right one is rejected as well"


def test_sequences_reach_every_action_and_are_rarely_refused() -> None:
    rules, names, raised, skipped = BF16Rules(), Counter[str](), Counter[str](), 0
    for number in range(40):
        side = Side(Reference, rules, "mixed", "cpu")
        for act in sequence(rules, 0, "mixed", number):
            side.carry_out(act)
            names[act.name] += 1
            raised[act.name] += "raised" in side.outcome
            assert side.world is not None
            if act.name in ("step", "train"):
                skipped += bool(getattr(side.world.optimizer, "overflow", False))
    assert set(names) == set(rules.actions())
    refused = {name for name, count in raised.items() if count}
    always = {"add_group", "add_group_again", "step_with_closure"}
    assert refused <= {*always, "whole", "set_whole"}
    assert all(raised[name] == names[name] for name in always)
    assert raised["whole"] < names["whole"]
    assert skipped >= 5


def test_actions_say_which_methods_they_really_call() -> None:
    tree = ast.parse((ROOT / "parity" / "sequences" / "bf16_rules.py").read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            called = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            declared = BF16Rules().actions()[function.name].drives
            assert set(declared) <= {*called, "load_state_dict"}, function.name
