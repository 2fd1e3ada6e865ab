"""Scalers of the fast side: recorded traces, the reference's dicts, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import twinstep.reference.optimizers.scalers
from twinstep.contract.compat import Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.fast.optimizers.scalers import DynamicLossScale, StaticLossScale
from twinstep.golden.trace import Trace, read_all

pytestmark = pytest.mark.usefixtures("replay")

RULES = ("dynamic", "wrapper", "torch")
TRACES = [trace for trace in read_all() if trace.header.rule in RULES]
NAMES = {"growth_factor": "scale_factor", "growth_interval": "scale_window"}


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.header.name)
def test_a_scaler_repeats_the_beginning_of_every_recorded_trace(trace: Trace) -> None:
    constants: Any = {NAMES.get(k, k): v for k, v in dict(trace.header.constants).items()}
    start = float(trace.header.start["scale"])
    scaler = DynamicLossScale(rule=trace.header.rule, init_scale=start, **constants)
    # Each step is a launch on replay: the beginnings hold every kind of transition.
    for letter, wanted in list(zip(trace.header.steps, trace.steps, strict=True))[:40]:
        raised = False
        try:
            scaler.update_scale(letter == "o")
        except MinimumLossScale:
            raised = True
        got = {"scale": scaler.loss_scale, **scaler.state_dict(), "raised": raised}
        assert all(got[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("rule", RULES)
def test_states_are_interchangeable_with_the_references(rule: str) -> None:
    ours = DynamicLossScale(rule=rule, init_scale=64.0, scale_window=2, delayed_shift=1)
    theirs = twinstep.reference.optimizers.scalers.DynamicLossScale(
        rule=rule, init_scale=8.0, scale_window=2, delayed_shift=1
    )
    ours.update_scale(True)
    theirs.load_state_dict(ours.state_dict())
    for overflow in (False, False, False, True):
        ours.update_scale(overflow)
        theirs.update_scale(overflow)
    assert ours.state_dict() == theirs.state_dict()
    ours.load_state_dict({**theirs.state_dict(), "cur_scale": math.inf})
    assert ours.loss_scale == math.inf


def test_a_static_scale_counts_steps_and_stays() -> None:
    scaler = StaticLossScale(scale=3.7)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
    assert scaler.state_dict() == {"dynamic_loss_scale": False, "cur_scale": 3.7, "cur_iter": 3}


def test_a_loss_is_scaled_in_fp32_and_so_is_its_gradient() -> None:
    weight = torch.ones(3, dtype=torch.float16, requires_grad=True)
    scaler = DynamicLossScale(init_scale=65536.0)
    scaled = scaler.scale_loss(weight.sum())
    assert (scaled.dtype, scaled.item()) == (torch.float32, 3 * 65536.0)
    weights = torch.ones(3, requires_grad=True)
    scaler.backward(weights.sum())
    assert weights.grad is not None
    assert weights.grad.tolist() == [65536.0] * 3
    assert scaler.scale_gradient(torch.nn.Identity(), (None, weights.grad), ())[0] is None


def test_an_overflow_of_any_gradient_is_found() -> None:
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    scaler = StaticLossScale()
    assert not scaler.has_overflow(params)
    params[0].grad, params[1].grad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert scaler.has_overflow(params)
    assert not scaler.has_overflow(params[:1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cur_scale": -2.0}, "loss scale is -2.0"),
        ({"cur_iter": 1.5}, "cur_iter=1.5, but should be a whole number"),
        ({"dynamic_loss_scale": False}, "dynamic_loss_scale=False, but should be True"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, Any], sentence: str) -> None:
    scaler = DynamicLossScale(rule="wrapper", init_scale=4.0)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=sentence):
        scaler.load_state_dict({**before, **change})
    assert scaler.state_dict() == before


def test_wrong_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="rule='static', but should be one of dynamic"):
        DynamicLossScale(rule="static")
    with pytest.raises(ValueError, match="loss scale is inf, but should be positive and finite"):
        StaticLossScale(scale=math.inf)
    early = DynamicLossScale(compat=Compat(growth_counts_this_step=True))
    with pytest.raises(RuntimeError, match="compat has growth_counts_this_step"):
        early.update_scale(False)
