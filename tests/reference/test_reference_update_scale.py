"""The tensor-shaped loss-scale rules say what the pure ones say, in the dtypes of the contract."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from twinstep.parity.operations.scales import (
    update_scale_dynamic,
    update_scale_torch,
    update_scale_wrapper,
)
from twinstep.reference.arithmetic import float64
from twinstep.reference.loss_scale import DynamicRule, ScaleState, TorchRule, WrapperRule
from twinstep.reference.optimizers.scalers import DynamicLossScale


def flag(overflow: bool) -> Tensor:
    return torch.tensor(1.0 if overflow else 0.0)


def dynamic(state: ScaleState, overflow: bool, rule: DynamicRule, exhausted: int) -> list[Tensor]:
    return list(
        update_scale_dynamic(
            scale=float64(state.scale),
            cur_iter=torch.tensor(state.cur_iter),
            last_overflow_iter=torch.tensor(state.last_overflow_iter),
            cur_hysteresis=torch.tensor(state.cur_hysteresis),
            exhausted=torch.tensor(exhausted),
            found_inf=flag(overflow),
            scale_factor=float64(rule.scale_factor),
            scale_window=torch.tensor(rule.scale_window),
            min_scale=float64(rule.min_scale),
            delayed_shift=torch.tensor(rule.delayed_shift),
            consecutive_hysteresis=rule.consecutive_hysteresis,
            raise_error_at_min_scale=rule.raise_error_at_min_scale,
        )
    )


RULES = [
    DynamicRule(scale_window=w, delayed_shift=d, consecutive_hysteresis=c, min_scale=2.0)
    for w, d, c in product([1, 3], [0, 1, 2], [False, True])
]


@pytest.mark.parametrize("rule", RULES, ids=[f"rule{index}" for index in range(len(RULES))])
def test_dynamic_operation_follows_the_pure_rule(rule: DynamicRule) -> None:
    for overflows in product([False, True], repeat=5):
        state = ScaleState(scale=4.0, cur_hysteresis=rule.delayed_shift)
        for overflow in overflows:
            got = dynamic(state, overflow, rule, 0)
            state = rule.after(replace(state, exhausted=0), overflow)
            wanted = [state.scale, state.cur_iter, state.last_overflow_iter, state.cur_hysteresis]
            assert [t.item() for t in got] == [*wanted, state.exhausted]


def test_exhausted_stays_until_somebody_clears_it() -> None:
    got = dynamic(ScaleState(scale=4.0), False, DynamicRule(), 1)
    assert got[-1].item() == 1


def test_scales_are_float64_and_counters_int64() -> None:
    got = dynamic(ScaleState(scale=4), False, DynamicRule(), 0)
    assert [t.dtype for t in got] == [torch.float64] + [torch.int64] * 4


@pytest.mark.parametrize("rule", ["dynamic", "wrapper"])
def test_a_whole_number_for_the_floor_makes_no_whole_scale(rule: str) -> None:
    scaler = DynamicLossScale(rule=rule, init_scale=3.0, min_scale=2, delayed_shift=1)
    scaler.update_scale(True)
    assert scaler.loss_scale == 2.0
    assert isinstance(scaler.loss_scale, float)


def test_wrapper_operation_follows_the_pure_rule() -> None:
    rule = WrapperRule(scale_window=2, min_scale=0.5)
    for overflows in product([False, True], repeat=6):
        state = ScaleState(scale=1.0)
        for overflow in overflows:
            got = update_scale_wrapper(
                scale=float64(state.scale),
                cur_iter=torch.tensor(state.cur_iter),
                last_overflow_iter=torch.tensor(state.last_overflow_iter),
                found_inf=flag(overflow),
                scale_factor=float64(rule.scale_factor),
                scale_window=torch.tensor(rule.scale_window),
                min_scale=float64(rule.min_scale),
            )
            state = rule.after(state, overflow)
            wanted = (state.scale, state.cur_iter, state.last_overflow_iter)
            assert tuple(t.item() for t in got) == wanted


def test_torch_operation_follows_the_pure_rule() -> None:
    rule = TorchRule(growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    for overflows in product([False, True], repeat=6):
        state = ScaleState(scale=3.0)
        for overflow in overflows:
            got = update_scale_torch(
                scale=float64(state.scale),
                growth_tracker=torch.tensor(state.growth_tracker),
                found_inf=flag(overflow),
                growth_factor=float64(rule.growth_factor),
                backoff_factor=float64(rule.backoff_factor),
                growth_interval=torch.tensor(rule.growth_interval),
            )
            state = rule.after(state, overflow)
            assert tuple(t.item() for t in got) == (state.scale, state.growth_tracker)
            assert [t.dtype for t in got] == [torch.float64, torch.int64]
