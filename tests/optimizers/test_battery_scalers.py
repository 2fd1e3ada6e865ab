"""Scalers of both sides: recorded traces, a loss, a dict, and what they refuse."""

from __future__ import annotations

import io
import math
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.helpers.sides import CLASSES, SIDES
from twinstep.contract.compat import Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.golden.trace import Trace, read_all

pytestmark = pytest.mark.usefixtures("replay")

BOTH = pytest.mark.parametrize("side", SIDES)
RULES = ("dynamic", "wrapper", "torch")
TRACES = pytest.mark.parametrize(
    "trace",
    # Those whose events are overflows alone; whole steps replay the others, too.
    [t for t in read_all() if t.header.rule in RULES and set(t.header.steps) <= {"g", "o"}],
    ids=lambda trace: trace.header.name,
)


def dynamic(side: str, **options: Any) -> Any:
    return CLASSES[side]["DynamicLossScale"](**options)


def static(side: str, **options: Any) -> Any:
    return CLASSES[side]["StaticLossScale"](**options)


def held(scaler: Any) -> tuple[object, object]:
    """Its dict, and what the reference keeps besides."""
    return scaler.state_dict(), getattr(scaler, "state", None)


def made(side: str, trace: Trace) -> Any:
    given = dict(trace.header.constants)
    names = {"growth_factor": "scale_factor", "growth_interval": "scale_window"}
    renamed = {names.get(name, name): value for name, value in given.items()}
    scale = float(trace.header.start["scale"])
    return dynamic(side, rule=trace.header.rule, init_scale=scale, **renamed)


@BOTH
@TRACES
def test_a_scaler_repeats_every_recorded_trace(side: str, trace: Trace) -> None:
    scaler = made(side, trace)
    # Each step is a launch on replay: the beginnings hold every kind of transition.
    count = 40 if side == "fast" else None
    for letter, wanted in list(zip(trace.header.steps, trace.steps, strict=True))[:count]:
        raised = False
        try:
            scaler.update_scale(letter == "o")
        except MinimumLossScale:
            raised = True
        got = {"scale": scaler.loss_scale, **scaler.state_dict(), "raised": raised}
        assert all(got[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("cut", [0, 1, 5])
@TRACES
def test_a_saved_scaler_continues_like_the_original(trace: Trace, cut: int) -> None:
    scaler, other = made("reference", trace), made("reference", trace)
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


def try_update(scaler: Any, letter: str) -> None:
    with suppress(MinimumLossScale):
        scaler.update_scale(letter == "o")


@pytest.mark.parametrize("rule", RULES)
def test_states_of_the_two_sides_are_interchangeable(rule: str) -> None:
    options = {"rule": rule, "scale_window": 2, "delayed_shift": 1}
    ours = dynamic("fast", init_scale=64.0, **options)
    theirs = dynamic("reference", init_scale=8.0, **options)
    ours.update_scale(True)
    theirs.load_state_dict(ours.state_dict())
    for overflow in (False, False, False, True):
        ours.update_scale(overflow)
        theirs.update_scale(overflow)
    assert ours.state_dict() == theirs.state_dict()
    ours.load_state_dict({**theirs.state_dict(), "cur_scale": math.inf})
    assert ours.loss_scale == math.inf


@BOTH
@pytest.mark.parametrize("floor", [1.0, 0.5])
def test_an_error_at_the_floor_names_it_and_changes_nothing(side: str, floor: float) -> None:
    scaler = dynamic(side, init_scale=2 * floor, min_scale=floor, delayed_shift=1)
    scaler.update_scale(True)
    before = held(scaler)
    for _ in range(2):
        with pytest.raises(
            MinimumLossScale, match=rf"at loss scale {floor},.*min_scale={floor} .*\[step 1\]"
        ):
            scaler.update_scale(True)
        assert held(scaler) == before


@BOTH
def test_a_static_scale_never_moves_and_counts_its_steps(side: str) -> None:
    scaler = static(side, scale=3.7)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
    assert scaler.state_dict() == {"dynamic_loss_scale": False, "cur_scale": 3.7, "cur_iter": 3}


@BOTH
@pytest.mark.parametrize("make", [static, dynamic])
def test_the_loss_is_scaled_in_fp32_and_so_is_its_gradient(side: str, make: Any) -> None:
    scaler = make(side, **{"scale" if make is static else "init_scale": 65536.0})
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    scaled = scaler.scale_loss(torch.tensor(2.0).half())
    assert (scaled.dtype, scaled.item()) == (torch.float32, 131072.0)
    scaler.backward((weight.float() * 2).sum())
    assert weight.grad is not None
    assert math.isinf(weight.grad.item())  # 131072 is no fp16 number
    assert scaler.has_overflow([weight])
    wide = torch.ones(3, requires_grad=True)
    scaler.backward(wide.sum())
    assert wide.grad is not None
    assert wide.grad.tolist() == [65536.0] * 3


@BOTH
def test_a_hook_scales_what_is_there(side: str) -> None:
    grads = static(side, scale=4.0).scale_gradient(torch.nn.Identity(), (torch.ones(2), None), ())
    assert grads[0].tolist() == [4.0, 4.0]
    assert grads[1] is None


@BOTH
@pytest.mark.parametrize("make", [static, dynamic])
def test_overflow_is_looked_for_in_gradients_alone(side: str, make: Any) -> None:
    """Edge LS-3."""
    params = [torch.full((3,), value, requires_grad=True) for value in (1.0, math.inf)]
    scaler = make(side)
    assert not scaler.has_overflow(params)
    params[0].grad, params[1].grad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert scaler.has_overflow(params)
    assert not scaler.has_overflow(params[:1])
    params[0].grad = torch.ones(3, 3)[:, 0]
    assert not scaler.has_overflow(params[:1])


@BOTH
@pytest.mark.parametrize("rule", ["static", "wrapper", "torch"])
def test_what_does_not_fit_is_refused_and_changes_nothing(side: str, rule: str) -> None:
    scaler = static(side, scale=2.0) if rule == "static" else dynamic(side, rule=rule)
    good, before, flag = scaler.state_dict(), held(scaler), rule != "static"
    bad: list[tuple[dict[str, object], str]] = [
        ({}, "state has no dynamic_loss_scale, cur_scale"),
        (
            {**good, "dynamic_loss_scale": not flag},
            f"dynamic_loss_scale={not flag}, but should be {flag}.*the rule comes from the constr",
        ),
        ({**good, "cur_scale": -1.0}, "loss scale is -1.0, but should be positive"),
        ({**good, "cur_scale": "big"}, "loss scale is 'big', but should be a number"),
        ({**good, list(good)[-1]: 1.5}, f"{list(good)[-1]}=1.5, but should be a whole number"),
    ]
    for state, message in bad:
        with pytest.raises(ValueError, match=message):
            scaler.load_state_dict(state)
        assert held(scaler) == before


@BOTH
def test_states_of_different_rules_do_not_mix(side: str) -> None:
    """Edge LS-12: the wrapper's dict has no hysteresis."""
    saved = dynamic(side, rule="wrapper").state_dict()
    with pytest.raises(ValueError, match="state has no cur_hysteresis"):
        dynamic(side, rule="dynamic").load_state_dict(saved)


@BOTH
def test_constants_are_not_in_the_state(side: str) -> None:
    """Edge LS-13."""
    kept = {"dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
    assert set(dynamic(side, min_scale=0.25).state_dict()) == kept


@BOTH
@pytest.mark.parametrize("bad", [0.0, -2.0, math.inf, math.nan, "2", True])
def test_a_scale_that_cannot_be_is_refused(side: str, bad: float) -> None:
    with pytest.raises(ValueError, match="loss scale is .*, but should be"):
        static(side, scale=bad)
    with pytest.raises(ValueError, match="loss scale is .*, but should be"):
        dynamic(side, init_scale=bad)


@BOTH
def test_an_unknown_rule_is_named(side: str) -> None:
    for rule in ("apex", "static"):
        says = f"rule='{rule}', but should be one of dynamic, wrapper"
        with pytest.raises(ValueError, match=says):
            dynamic(side, rule=rule)


def test_the_fast_side_refuses_a_rule_that_it_has_no_kernel_for() -> None:
    early = dynamic("fast", compat=Compat(growth_counts_this_step=True))
    with pytest.raises(RuntimeError, match="compat has growth_counts_this_step"):
        early.update_scale(False)
