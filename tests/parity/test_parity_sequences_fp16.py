"""FP16 optimizers and LAMB under sequences of actions: what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.wrappers_driven import check_rejected, reached
from tests.helpers.wrong_fp16 import UPSTREAM
from twinstep.contract.moments import StateDict
from twinstep.fast.optimizers.fp16 import FP16Optimizer
from twinstep.fast.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.runner.calls.remote import RemoteSides
from twinstep.parity.runner.source import Source
from twinstep.parity.sequences.drawing import sequence
from twinstep.parity.sequences.drive import run
from twinstep.parity.sequences.fills import filled
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.judge import one_thread
from twinstep.parity.sequences.parts import LARGE
from twinstep.parity.sequences.world import World
from twinstep.reference.optimizers.scalers import StaticLossScale


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
        self._stale = None
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
    check_rejected(cls, "fp16", sequences=60, seed=2)


def test_sequences_reach_every_action_and_are_rarely_refused() -> None:
    names, raised, skipped = reached("FP16Optimizer")
    always = {"add_group", "add_group_again", "step_with_closure"}
    wrong = {"construct_wrongly", "load_damaged", "assign_scale", "override", "step_on_text"}
    wrong |= {"backward"}  # through a graph that is gone
    wrong |= {"copy", "look_at_copy"}  # of gradients with a graph
    # A sparse gradient is refused, in whatever reads it.
    assert raised.keys() <= {*always, *wrong, "step", "train", "report"}
    assert raised["step"] + raised["train"] < (names["step"] + names["train"]) / 8
    assert raised["override"] < names["override"]
    assert skipped >= 5


def test_a_gradient_with_a_graph_does_not_depend_on_the_number_of_threads() -> None:
    """A sum of so many elements does; the judge gives torch one thread besides."""
    found, before = list[Tensor](), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            param = Parameter(filled(LARGE, torch.float32, "ordinary", 1))
            world = World(FP16Optimizer, {}, [param], StaticLossScale(), torch.device("cpu"))
            FP16Rules().backward(world, 1, 1.0, "fp32", "create")
            assert param.grad is not None
            assert param.grad.requires_grad
            found.append(param.grad.detach())
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_wrapper_in_a_process_of_its_own_is_seen_as_its_reference_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from twinstep import fast\n"
        "from twinstep.parity import register_optimizer\n"
        "against = {'reference': 'FP16Optimizer', 'arithmetic': 'exact', 'dtypes': ('fp16',)}\n"
        "@register_optimizer('mine', **against)\n"
        "class Mine(fast.FP16Optimizer):\n"
        "    pass\n"
    )
    opened = Source(file=str(file)).open()
    assert opened.subject is not None
    try:
        twin = opened.optimizers[0].over_ranks()
        assert twin is not None
        build = sequence(twin.rules, 0, "fp16", 0)[:1]
        assert (
            run(
                twin,
                "fp16",
                "cpu",
                build,
                RemoteSides(opened.subject, engine_named("replay"), 60.0),
            )
            is None
        )
    finally:
        opened.subject.close()
