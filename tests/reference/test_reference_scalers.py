"""Scalers as objects: the rules of `reference.loss_scale`, a loss, a dict."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from twinstep.contract.errors import MinimumLossScale
from twinstep.golden.trace import Trace, read_all
from twinstep.reference.optimizers.scalers import DynamicLossScale, LossScale, StaticLossScale

RULES = ("dynamic", "wrapper", "torch")
TRACES = [trace for trace in read_all() if trace.header.rule in RULES]


def made(trace: Trace) -> DynamicLossScale:
    given = dict(trace.header.constants)
    names = {"growth_factor": "scale_factor", "growth_interval": "scale_window"}
    renamed = {names.get(name, name): value for name, value in given.items()}
    make: Callable[..., DynamicLossScale] = DynamicLossScale
    return make(rule=trace.header.rule, init_scale=float(trace.header.start["scale"]), **renamed)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.header.name)
def test_a_scaler_repeats_every_recorded_trace(trace: Trace) -> None:
    scaler = made(trace)
    for letter, wanted in zip(trace.header.steps, trace.steps, strict=True):
        raised = False
        try:
            scaler.update_scale(letter == "o")
        except MinimumLossScale:
            raised = True
        got = {"scale": scaler.loss_scale, **scaler.state_dict(), "raised": raised}
        assert all(got[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("cut", [0, 1, 5])
@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.header.name)
def test_a_saved_scaler_continues_like_the_original(trace: Trace, cut: int) -> None:
    scaler, other = made(trace), made(trace)
    for letter in trace.header.steps[:cut]:
        try_update(scaler, letter)
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for letter in trace.header.steps[cut:]:
        try_update(scaler, letter)
        try_update(other, letter)
        assert scaler.state == other.state


def try_update(scaler: LossScale, letter: str) -> None:
    with suppress(MinimumLossScale):
        scaler.update_scale(letter == "o")


@pytest.mark.parametrize("floor", [1.0, 0.5])
def test_an_error_at_the_floor_names_it_and_changes_nothing(floor: float) -> None:
    scaler = DynamicLossScale(init_scale=2 * floor, min_scale=floor, delayed_shift=1)
    scaler.update_scale(True)
    before = scaler.state
    for _ in range(2):
        with pytest.raises(
            MinimumLossScale, match=rf"at loss scale {floor},.*min_scale={floor} .*\[step 1\]"
        ):
            scaler.update_scale(True)
        assert scaler.state == before


def test_a_static_scale_never_moves_and_counts_its_steps() -> None:
    scaler = StaticLossScale(scale=128)
    for overflow in (True, False):
        scaler.update_scale(overflow)
    assert scaler.state_dict() == {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 2}


@pytest.mark.parametrize("scaler", [StaticLossScale(scale=65536.0), DynamicLossScale()])
def test_the_loss_is_scaled_in_fp32(scaler: LossScale) -> None:
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    loss = (weight.float() * 2).sum()
    assert scaler.scale_loss(torch.tensor(2.0).half()).item() == 131072.0
    scaler.backward(loss)
    assert weight.grad is not None
    assert math.isinf(weight.grad.item())  # 131072 is no fp16 number
    assert scaler.has_overflow([weight])


def test_a_hook_scales_what_is_there() -> None:
    scaler = StaticLossScale(scale=4.0)
    grads = scaler.scale_gradient(torch.nn.Identity(), (torch.ones(2), None), ())
    assert grads[0] is not None
    assert grads[0].tolist() == [4.0, 4.0]
    assert grads[1] is None


def test_overflow_is_looked_for_in_gradients_alone() -> None:
    """Edge LS-3."""
    weight = torch.full((2,), math.inf, requires_grad=True)
    scaler = DynamicLossScale()
    assert not scaler.has_overflow([weight])
    weight.grad = torch.tensor([1.0, math.nan])
    assert scaler.has_overflow([weight])


@pytest.mark.parametrize("scaler", [StaticLossScale(scale=2.0), DynamicLossScale(rule="torch")])
def test_what_does_not_fit_is_refused_and_changes_nothing(scaler: LossScale) -> None:
    good, before = scaler.state_dict(), copy.copy(scaler.state)
    bad: list[tuple[dict[str, object], str]] = [
        ({}, "state has no dynamic_loss_scale, cur_scale"),
        ({**good, "dynamic_loss_scale": not scaler.dynamic}, "the rule comes from the constructor"),
        ({**good, "cur_scale": -1.0}, "loss scale is -1.0, but should be positive"),
        ({**good, "cur_scale": "big"}, "loss scale is 'big', but should be a number"),
        ({**good, list(good)[-1]: 1.5}, "=1.5, but should be a whole number"),
    ]
    for state, message in bad:
        with pytest.raises(ValueError, match=message):
            scaler.load_state_dict(state)
        assert scaler.state == before


def test_states_of_different_rules_do_not_mix() -> None:
    """Edge LS-12: the wrapper's dict has no hysteresis."""
    saved = DynamicLossScale(rule="wrapper").state_dict()
    with pytest.raises(ValueError, match="state has no cur_hysteresis"):
        DynamicLossScale(rule="dynamic").load_state_dict(saved)


def test_constants_are_not_in_the_state() -> None:
    """Edge LS-13."""
    kept = {"dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
    assert set(DynamicLossScale(min_scale=0.25).state_dict()) == kept


@pytest.mark.parametrize("bad", [0.0, -2.0, math.inf, math.nan, "2", True])
def test_a_scale_that_cannot_be_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="loss scale is"):
        StaticLossScale(scale=bad)
    with pytest.raises(ValueError, match="loss scale is"):
        DynamicLossScale(init_scale=bad)


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="rule='apex', but should be one of dynamic, wrapper"):
        DynamicLossScale(rule="apex")
