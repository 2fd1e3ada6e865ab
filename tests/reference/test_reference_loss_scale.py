"""Loss-scale rules: decision tables row by row, published traces, and torch's real scaler."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from twinstep.contract.errors import MinimumLossScale
from twinstep.reference.loss_scale import (
    DynamicRule,
    ScaleState,
    StaticRule,
    TorchRule,
    WrapperRule,
)
from twinstep.reference.optimizers.scalers import DynamicLossScale


def dynamic_trace(rule: DynamicRule, scale: float, steps: str) -> list[tuple[float, int]]:
    state = ScaleState(scale=scale, cur_hysteresis=rule.delayed_shift)
    trace = []
    for step in steps:
        state = rule.after(state, step == "o")
        trace.append((state.scale, state.cur_hysteresis))
    return trace


def scales(trace: list[tuple[float, int]]) -> list[float]:
    return [scale for scale, _ in trace]


WINDOW_2 = DynamicRule(scale_window=2, delayed_shift=1)


def test_defaults_are_those_of_the_packages() -> None:
    rule, state = DynamicRule(), ScaleState(scale=1.0)
    assert (rule.scale_factor, rule.scale_window, rule.min_scale) == (2.0, 1000, 1.0)
    assert (state.cur_iter, state.last_overflow_iter) == (0, -1)
    assert rule.delayed_shift == state.cur_hysteresis == 2
    assert (rule.consecutive_hysteresis, rule.raise_error_at_min_scale) == (False, True)
    assert WrapperRule() == WrapperRule(scale_factor=2.0, scale_window=1000, min_scale=1.0)
    scaler = torch.amp.GradScaler("cpu").state_dict()
    rule_of_torch = TorchRule()
    assert rule_of_torch.growth_factor == scaler["growth_factor"]
    assert rule_of_torch.backoff_factor == scaler["backoff_factor"]
    assert rule_of_torch.growth_interval == scaler["growth_interval"]


def test_static_scale_never_moves() -> None:
    rule = StaticRule()
    assert rule.after(ScaleState(scale=128.0), True) == ScaleState(scale=128.0, cur_iter=1)
    assert rule.after(ScaleState(scale=128.0), False) == ScaleState(scale=128.0, cur_iter=1)


def test_growth_comes_after_a_full_window() -> None:
    got = scales(dynamic_trace(WINDOW_2, 16.0, "gggggggo" + "gggggg"))
    assert got == [16, 16, 32, 32, 64, 64, 128, 64, 64, 64, 128, 128, 256, 256]


def test_growth_with_a_full_window_is_one_step_earlier() -> None:
    rule = DynamicRule(scale_window=2, delayed_shift=1, growth_counts_this_step=True)
    got = scales(dynamic_trace(rule, 16.0, "ggggggo" + "ggggg"))
    assert got == [16, 32, 32, 64, 64, 128, 64, 64, 128, 128, 256, 256]


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_the_two_growth_tests_differ_by_one_step(window: int) -> None:
    late, soon = (
        DynamicRule(scale_window=window, growth_counts_this_step=early) for early in (False, True)
    )
    for cur_iter in range(1, 30):
        before = [ScaleState(scale=4.0, cur_iter=at) for at in (cur_iter, cur_iter - 1)]
        assert late.after(before[0], False).scale == soon.after(before[1], False).scale


def test_hysteresis_is_spent_before_the_scale_shrinks() -> None:
    trace = dynamic_trace(DynamicRule(delayed_shift=3), 4.0, "oooo")
    assert trace == [(4, 2), (4, 1), (2, 1), (1, 1)]


def test_shrinking_does_not_refill_hysteresis_and_growth_does() -> None:
    trace = dynamic_trace(DynamicRule(scale_window=3), 16.0, "ogooggggoo")
    assert scales(trace) == [16, 16, 8, 4, 4, 4, 4, 8, 8, 4]
    assert [hysteresis for _, hysteresis in trace] == [1, 1, 1, 1, 1, 1, 1, 2, 1, 1]


def test_consecutive_hysteresis_is_refilled_by_every_clean_step() -> None:
    rule = DynamicRule(scale_window=3, consecutive_hysteresis=True)
    trace = dynamic_trace(rule, 16.0, "ogoogoggggg")
    hysteresis = [1, 2, 1, 1, 2, 1, 2, 2, 2, 2, 2]
    assert trace == list(zip([16, 16, 16, 8, 8, 8, 8, 8, 8, 16, 16], hysteresis, strict=True))


def test_an_empty_budget_never_shrinks() -> None:
    trace = dynamic_trace(DynamicRule(delayed_shift=0), 8.0, "ooooo")
    assert trace == [(8, -1), (8, -2), (8, -3), (8, -4), (8, -5)]


def test_overflow_at_the_floor_is_an_error_and_changes_nothing() -> None:
    rule = DynamicRule(delayed_shift=1)
    state = ScaleState(scale=1.0, cur_iter=4, last_overflow_iter=3, cur_hysteresis=1)
    once = rule.after(state, True)
    assert once == replace(state, exhausted=1)
    assert rule.after(once, True) == once


def test_the_error_shows_a_fractional_scale() -> None:
    scaler = DynamicLossScale(init_scale=0.5, min_scale=0.5, delayed_shift=1)
    with pytest.raises(MinimumLossScale, match="at loss scale 0.5,"):
        scaler.update_scale(True)


def test_without_the_error_the_scale_stays_at_the_floor() -> None:
    rule = DynamicRule(delayed_shift=1, raise_error_at_min_scale=False)
    state = rule.after(ScaleState(scale=1.0), True)
    assert (state.scale, state.cur_iter, state.last_overflow_iter) == (1.0, 1, 0)


def test_a_scale_below_the_floor_is_raised_to_it() -> None:
    for scale in (0.25, 0.5, 1.5):
        state = DynamicRule(delayed_shift=1).after(ScaleState(scale=scale), True)
        assert state.scale == 1.0


def test_hysteresis_at_the_floor_is_spent_before_the_error() -> None:
    state = ScaleState(scale=1.0, cur_hysteresis=2)
    state = DynamicRule(delayed_shift=2).after(state, True)
    assert (state.scale, state.cur_hysteresis) == (1.0, 1)


def test_wrapper_rule_has_no_hysteresis_and_no_error() -> None:
    state, rule = ScaleState(scale=4.0), WrapperRule(scale_window=2)
    got = []
    for step in "gggoooo":
        state = rule.after(state, step == "o")
        got.append(state.scale)
    assert got == [4, 4, 8, 4, 2, 1, 1]
    assert (state.cur_iter, state.last_overflow_iter) == (7, 6)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("min_scale", [0.25, 1.0])
def test_wrapper_rule_is_the_dynamic_rule_without_its_extras(window: int, min_scale: float) -> None:
    wrapper_rule = WrapperRule(scale_window=window, min_scale=min_scale)
    dynamic_rule = DynamicRule(
        scale_window=window, min_scale=min_scale, delayed_shift=1, raise_error_at_min_scale=False
    )
    for overflows in product([False, True], repeat=7):
        wrapper = ScaleState(scale=2.0)
        dynamic = ScaleState(scale=2.0, cur_hysteresis=1)
        for overflow in overflows:
            wrapper = wrapper_rule.after(wrapper, overflow)
            dynamic = dynamic_rule.after(dynamic, overflow)
        assert (wrapper.scale, wrapper.cur_iter, wrapper.last_overflow_iter) == (
            dynamic.scale,
            dynamic.cur_iter,
            dynamic.last_overflow_iter,
        )


class RealScaler:
    """`torch.amp.GradScaler` driven by a gradient that is finite or not."""

    def __init__(self, state: ScaleState, rule: TorchRule) -> None:
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=state.scale,
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.growth_interval,
        )
        self.scaler.load_state_dict(
            {**self.scaler.state_dict(), "_growth_tracker": state.growth_tracker}
        )
        self.scaler.scale(torch.ones(()))
        self.param = torch.nn.Parameter(torch.zeros(1))
        self.sgd = torch.optim.SGD([self.param], lr=0.0)

    def update(self, overflow: bool) -> ScaleState:
        """One optimizer step through the scaler's public interface."""
        self.param.grad = torch.tensor([torch.inf if overflow else 1.0])
        self.scaler.step(self.sgd)
        self.scaler.update()
        state = self.scaler.state_dict()
        return ScaleState(scale=state["scale"], growth_tracker=state["_growth_tracker"])


def follow(state: ScaleState, rule: TorchRule, overflows: tuple[bool, ...]) -> None:
    real = RealScaler(state, rule)
    for overflow in overflows:
        state = rule.after(state, overflow)
        assert state == real.update(overflow)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_torch_rule_is_the_real_scaler_on_every_sequence(interval: int) -> None:
    rule = TorchRule(growth_interval=interval)
    for overflows in product([False, True], repeat=6):
        follow(ScaleState(scale=4.0), rule, overflows)


@pytest.mark.parametrize(
    ("scale", "growth", "backoff"),
    [
        (3e38, 2.0, 0.5),
        (2.0**127, 2.0, 0.5),
        (2.0**-148, 2.0, 0.5),
        (65536.0, 1.1, 0.3),
        (0.1, 3.0, 0.7),
        (1e30, 1e9, 1e-9),
    ],
)
def test_torch_rule_is_the_real_scaler_at_the_ends_of_fp32(
    scale: float, growth: float, backoff: float
) -> None:
    start = ScaleState(scale=torch.tensor(scale).item())
    rule = TorchRule(growth_factor=growth, backoff_factor=backoff, growth_interval=2)
    for overflows in product([False, True], repeat=5):
        follow(start, rule, overflows)


def test_torch_rule_worked_by_hand() -> None:
    rule, state, got = TorchRule(growth_interval=2), ScaleState(scale=4.0), []
    for overflow in (False, False, False, False, False, True, False, False, False):
        state = rule.after(state, overflow)
        got.append((state.scale, state.growth_tracker))
    assert got[:5] == [(4, 1), (8, 0), (8, 1), (16, 0), (16, 1)]
    assert got[5:] == [(8, 0), (8, 1), (16, 0), (16, 1)]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"scale_window={window}, but should be at least 1"):
        DynamicRule(scale_window=window)
    with pytest.raises(ValueError, match=r"\[WrapperRule\]"):
        WrapperRule(scale_window=window)
    with pytest.raises(ValueError, match=r"\[TorchRule\]"):
        TorchRule(growth_interval=window)
