"""FP16 optimizers and LAMB under sequences of actions: what is wrong is named."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.wrong_fp16 import UPSTREAM
from twinstep.contract.moments import StateDict
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.parity.registry.engines import running
from twinstep.parity.sequences.drive import Side, run, sequence
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.fp16_unfused_rules import FP16UnfusedRules
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.lamb_rules import LambRules
from twinstep.parity.sequences.registry import (
    REFERENCES,
    Twin,
    borrowed_twins,
    register_optimizer,
    twins,
)


def ours(name: str) -> Twin:
    """A twin as it is registered."""
    with borrowed_twins():
        register_our_optimizers()
        return next(twin for twin in twins() if twin.name == name)


class StateOnSkip(FP16Optimizer):
    """Shows state after a step that was skipped."""

    def _sync_state(self) -> None:
        self._held().state.update(self._pending)
        self._pending.clear()


class ForgetsExternal(FP16Optimizer):
    """Does not divide by the scale from outside."""

    def _external_scale(self) -> None:
        return None


class ScaledNorm(FP16Optimizer):
    """Reports the norm of the scaled gradients."""

    def get_global_norm(self) -> float:
        """Multiply again."""
        return super().get_global_norm() * self.loss_scale


class OldMasters(FP16Optimizer):
    """Leaves the masters when weights were loaded into the model."""

    def refresh_fp32_params(self) -> None:
        """Do nothing."""


class ForgetsScale(FP16Optimizer):
    """Does not restore the loss scale."""

    def load_state_dict(self, state_dict: StateDict, load_optimizer_states: bool = True) -> None:
        """Put back the state of before."""
        before = self.loss_scaler.state_dict()
        super().load_state_dict(state_dict, load_optimizer_states)
        self.loss_scaler.load_state_dict(before)


class SkipsMissing(FP16UnfusedOptimizer):
    """Leaves a gradient of a skipped step where it is."""

    def _sync_state(self) -> None:
        self._stale = []
        super()._sync_state()


class OneRatio(FusedLamb):
    """Reports the trust ratio of the first parameter for all."""

    def get_lamb_coeffs(self) -> list[float]:
        """Repeat it."""
        found = super().get_lamb_coeffs()
        return found[:1] * len(found)


class DropsNothing(FP16Optimizer):
    """Leaves gradients behind a step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Put them back."""
        params = [param for group in self.fp16_groups for param in group]
        kept: list[Tensor | None] = [param.grad for param in params]
        super().step(closure)  # type: ignore[call-overload]
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad


WRONG: tuple[type[torch.optim.Optimizer], ...] = (
    StateOnSkip,
    ForgetsExternal,
    ScaledNorm,
    OldMasters,
    ForgetsScale,
    DropsNothing,
    SkipsMissing,
    OneRatio,
    *UPSTREAM,
)


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_a_wrong_optimizer_is_rejected(cls: type[torch.optim.Optimizer]) -> None:
    base = cls.__mro__[1].__name__
    right = ours(f"fast.{base}")
    with borrowed_twins() as found:
        register_optimizer(
            cls.__name__,
            reference=base,
            arithmetic="exact",
            dtypes=("fp16",),
            private=(*right.private, *getattr(cls, "own", ())),
            engines=right.engines,
        )(cls)
    effort = TwinEffort(sequences=60, seed=2, repros=None, shrink_runs=0)
    cell = judge_twin(found[0], "fp16", twin_engine(found[0]), effort)
    assert "breaks `sequences`" in cell.failure
    assert "Error" not in cell.failure, f"rejected for the wrong reason: {cell.failure}"
    acts = sequence(right.rules, effort.seed, "fp16", cell.sequences - 1)
    with running(twin_engine(right)):
        assert run(right, "fp16", "cpu", acts) is None, "the right one is rejected as well"


def test_sequences_reach_every_action_and_are_rarely_refused() -> None:
    rules, names, raised, skipped = FP16Rules(), Counter[str](), Counter[str](), 0
    for number in range(40):
        side = Side(REFERENCES["FP16Optimizer"], rules, "mixed", "cpu")
        for act in sequence(rules, 0, "mixed", number):
            side.carry_out(act)
            names[act.name] += 1
            raised[act.name] += "raised" in side.outcome
            assert side.world is not None
            if act.name in ("step", "train"):
                skipped += bool(getattr(side.world.optimizer, "overflow", False))
    assert set(names) == set(rules.actions())
    always = {"add_group", "add_group_again", "step_with_closure"}
    assert {name for name, count in raised.items() if count} <= {
        *always,
        "assign_scale",
        "override",
    }
    assert raised["override"] < names["override"]
    assert skipped >= 5


@pytest.mark.parametrize("rules", [FP16Rules(), FP16UnfusedRules(), LambRules()])
def test_actions_say_which_methods_they_really_call(rules: FP16Rules | LambRules) -> None:
    file = Path(str(__import__(type(rules).__module__, fromlist=["x"]).__file__))
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            called = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            declared = rules.actions()[function.name].drives
            assert set(declared) <= called, function.name
