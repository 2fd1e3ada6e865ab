"""The loss-scale rules as operations over 0-dim tensors: thin adapters of `reference.loss_scale`.

Scales, factors and floors are float64, counters int64, found_inf is fp32 (0.0 or 1.0); all have
shape (). Nothing is mutated: every function returns new tensors for what the operation writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinstep.contract.errors import MinimumLossScale
from twinstep.reference.loss_scale import (
    DynamicRule,
    DynamicState,
    GrowthTest,
    TorchRule,
    TorchState,
    WrapperRule,
    WrapperState,
    grows_after_full_window,
    update_dynamic,
    update_torch,
    update_wrapper,
)


def float64(x: float) -> Tensor:
    """A scale as a tensor: float64, shape ()."""
    return torch.tensor(x, dtype=torch.float64)


def int64(x: int) -> Tensor:
    """A counter as a tensor: int64, shape ()."""
    return torch.tensor(x, dtype=torch.int64)


def update_scale_dynamic(
    *,
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    cur_hysteresis: Tensor,
    exhausted: Tensor,
    found_inf: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
    delayed_shift: Tensor,
    consecutive_hysteresis: bool,
    raise_error_at_min_scale: bool,
    growth_test: GrowthTest = grows_after_full_window,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The dynamic rule; see `reference.loss_scale.update_dynamic` for its arguments.

    Returns:
        New scale, cur_iter, last_overflow_iter, cur_hysteresis, exhausted. Where the rule raises
        `MinimumLossScale`, exhausted is 1 and nothing else changes; otherwise exhausted keeps its
        value. The host raises when it reads it.
    """
    state = DynamicState(
        scale=scale.item(),
        cur_iter=int(cur_iter.item()),
        last_overflow_iter=int(last_overflow_iter.item()),
        cur_hysteresis=int(cur_hysteresis.item()),
    )
    rule = DynamicRule(
        scale_factor=scale_factor.item(),
        scale_window=int(scale_window.item()),
        min_scale=min_scale.item(),
        delayed_shift=int(delayed_shift.item()),
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
        growth_test=growth_test,
    )
    exhausted = exhausted.clone()
    try:
        state = update_dynamic(state, found_inf.item() != 0, rule)
    except MinimumLossScale:
        exhausted = int64(1)
    counters = (state.cur_iter, state.last_overflow_iter, state.cur_hysteresis)
    new_iter, new_last, new_hysteresis = map(int64, counters)
    return float64(state.scale), new_iter, new_last, new_hysteresis, exhausted


def update_scale_wrapper(
    *,
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    found_inf: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wrapper rule; see `reference.loss_scale.update_wrapper` for its arguments.

    Returns:
        New scale, cur_iter, last_overflow_iter.
    """
    state = WrapperState(
        scale=scale.item(),
        cur_iter=int(cur_iter.item()),
        last_overflow_iter=int(last_overflow_iter.item()),
    )
    rule = WrapperRule(
        scale_factor=scale_factor.item(),
        scale_window=int(scale_window.item()),
        min_scale=min_scale.item(),
    )
    state = update_wrapper(state, found_inf.item() != 0, rule)
    return float64(state.scale), int64(state.cur_iter), int64(state.last_overflow_iter)


def update_scale_torch(
    *,
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: Tensor,
    backoff_factor: Tensor,
    growth_interval: Tensor,
) -> tuple[Tensor, Tensor]:
    """Torch's rule; see `reference.loss_scale.update_torch` for its arguments.

    Returns:
        New scale (an fp32 number, kept as float64) and growth_tracker.
    """
    state = TorchState(scale=scale.item(), growth_tracker=int(growth_tracker.item()))
    rule = TorchRule(
        growth_factor=growth_factor.item(),
        backoff_factor=backoff_factor.item(),
        growth_interval=int(growth_interval.item()),
    )
    state = update_torch(state, found_inf.item() != 0, rule)
    return float64(state.scale), int64(state.growth_tracker)
