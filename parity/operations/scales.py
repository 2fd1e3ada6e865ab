"""Clip factors and loss-scale rules: operations on controls alone, one row each.

A reference here takes what its kernel takes, written arguments too, and calls the mathematics.
"""

from __future__ import annotations

import torch
from torch import Tensor

import twinstep.reference.clip
from twinstep.parity.operations import arguments, combinations, controls
from twinstep.parity.operations.operation import Bound, Operation
from twinstep.reference.arithmetic import float64
from twinstep.reference.loss_scale import DynamicRule, ScaleState, TorchRule, WrapperRule


def clip_factor(*, norm: Tensor, scale: Tensor, max_norm: Tensor, factor: Tensor) -> tuple[Tensor]:
    """`reference.clip.clip_factor`."""
    del factor
    return (twinstep.reference.clip.clip_factor(norm=norm, scale=scale, max_norm=max_norm),)


def clip_coefficient(*, norm: Tensor, max_norm: Tensor, factor: Tensor) -> tuple[Tensor]:
    """`reference.clip.clip_coefficient`."""
    del factor
    return (twinstep.reference.clip.clip_coefficient(norm=norm, max_norm=max_norm),)


def scale_state(scale: Tensor, **counters: Tensor) -> ScaleState:
    """The state that these controls hold; all shape ()."""
    return ScaleState(scale=scale.item(), **{name: int(x.item()) for name, x in counters.items()})


def scale_controls(state: ScaleState, *counters: str) -> tuple[Tensor, ...]:
    """The scale as float64, and the named counters as int64; all shape ()."""
    return (float64(state.scale), *[torch.tensor(getattr(state, name)) for name in counters])


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
) -> tuple[Tensor, ...]:
    """`reference.loss_scale.DynamicRule`; whoever reads `exhausted` on the host raises there."""
    state = scale_state(
        scale,
        cur_iter=cur_iter,
        last_overflow_iter=last_overflow_iter,
        cur_hysteresis=cur_hysteresis,
        exhausted=exhausted,
    )
    rule = DynamicRule(
        scale_factor=scale_factor.item(),
        scale_window=int(scale_window.item()),
        min_scale=min_scale.item(),
        delayed_shift=int(delayed_shift.item()),
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
    )
    after = rule.after(state, found_inf.item() != 0)
    return scale_controls(after, *rule.remembers, "exhausted")


def update_scale_wrapper(
    *,
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    found_inf: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
) -> tuple[Tensor, ...]:
    """`reference.loss_scale.WrapperRule`."""
    state = scale_state(scale, cur_iter=cur_iter, last_overflow_iter=last_overflow_iter)
    rule = WrapperRule(
        scale_factor=scale_factor.item(),
        scale_window=int(scale_window.item()),
        min_scale=min_scale.item(),
    )
    return scale_controls(rule.after(state, found_inf.item() != 0), *rule.remembers)


def update_scale_torch(
    *,
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: Tensor,
    backoff_factor: Tensor,
    growth_interval: Tensor,
) -> tuple[Tensor, ...]:
    """`reference.loss_scale.TorchRule`; the scale is an fp32 number, kept as float64."""
    state = scale_state(scale, growth_tracker=growth_tracker)
    rule = TorchRule(
        growth_factor=growth_factor.item(),
        backoff_factor=backoff_factor.item(),
        growth_interval=int(growth_interval.item()),
    )
    return scale_controls(rule.after(state, found_inf.item() != 0), *rule.remembers)


CLIP_FACTOR = Operation(
    name="clip_factor",
    summary="Unscale and clip as one factor, from the norm of the scaled gradients.",
    equations=(
        "c = (norm / scale + 1e-6) / max_norm, in float64",
        "factor = fp32(1 / (scale c)) if max_norm > 0 and c > 1, otherwise fp32(1 / scale)",
    ),
    controls=(controls.NORM, controls.SCALE, controls.MAX_NORM, controls.FACTOR_OUT),
    writes=("factor",),
    reference=clip_factor,
    combinations=combinations.SCALAR,
    laws=arguments.in_order(*arguments.FACTOR_LAWS, "power_of_two"),
    layouts=(),
    together=(controls.CLIPPED, controls.UNSCALED_CLIPPED),
)

CLIP_COEFFICIENT = Operation(
    name="clip_coefficient",
    summary="The clip coefficient of unscaled gradients.",
    equations=(
        "k = max_norm / (norm + 1e-6), in float64",
        "factor = fp32(k) if max_norm > 0 and k < 1, otherwise 1",
    ),
    controls=(controls.NORM, controls.MAX_NORM, controls.FACTOR_OUT),
    writes=("factor",),
    reference=clip_coefficient,
    combinations=combinations.SCALAR,
    laws=arguments.FACTOR_LAWS,
    layouts=(),
)

UPDATE_SCALE_DYNAMIC = Operation(
    name="update_scale_dynamic",
    summary="Loss-scale rule with hysteresis.",
    equations=(
        "shrinks = delayed_shift == 1 or cur_hysteresis == 1",
        "overflow: if it shrinks, scale == min_scale and raise_error_at_min_scale: exhausted = 1,",
        "  and nothing else changes",
        "  else, if it shrinks: scale = max(scale / scale_factor, min_scale)",
        "  else: cur_hysteresis = cur_hysteresis - 1",
        "  in both: last_overflow_iter = cur_iter;  cur_iter = cur_iter + 1",
        "clean: q = cur_iter - last_overflow_iter - 1;  grows = q > 0 and q mod scale_window == 0",
        "  if it grows: scale = scale * scale_factor",
        "  if it grows or consecutive_hysteresis: cur_hysteresis = delayed_shift",
        "  cur_iter = cur_iter + 1",
    ),
    controls=(
        controls.SCALE,
        controls.CUR_ITER,
        controls.LAST_OVERFLOW,
        controls.HYSTERESIS,
        controls.EXHAUSTED,
        controls.FOUND,
        controls.SCALE_FACTOR,
        controls.SCALE_WINDOW,
        controls.MIN_SCALE,
        controls.DELAYED_SHIFT,
    ),
    options=(arguments.CONSECUTIVE, arguments.RAISE_AT_MIN),
    writes=("scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "exhausted"),
    reference=update_scale_dynamic,
    combinations=combinations.SCALAR,
    laws=arguments.SCALER_LAWS,
    layouts=(),
    bound=Bound.EXACT,
    together=(
        controls.DYNAMIC,
        controls.LATE,
        {**controls.AT_FLOOR, "found_inf": 1.0, "raise_error_at_min_scale": True},
        {**controls.AT_FLOOR, "found_inf": 1.0, "raise_error_at_min_scale": False},
    ),
)

UPDATE_SCALE_WRAPPER = Operation(
    name="update_scale_wrapper",
    summary="Loss-scale rule of the optimizer wrappers: no hysteresis, silent at the floor.",
    equations=(
        "overflow: scale = max(scale / scale_factor, min_scale);  last_overflow_iter = cur_iter",
        "clean: q = cur_iter - last_overflow_iter - 1; if q > 0 and q mod scale_window = 0 the",
        "  scale grows by scale_factor",
        "cur_iter + 1",
    ),
    controls=(
        controls.SCALE,
        controls.CUR_ITER,
        controls.LAST_OVERFLOW,
        controls.FOUND,
        controls.SCALE_FACTOR,
        controls.SCALE_WINDOW,
        controls.MIN_SCALE,
    ),
    writes=("scale", "cur_iter", "last_overflow_iter"),
    reference=update_scale_wrapper,
    combinations=combinations.SCALAR,
    laws=arguments.SCALER_LAWS,
    layouts=(),
    bound=Bound.EXACT,
    together=(controls.LATE,),
)

UPDATE_SCALE_TORCH = Operation(
    name="update_scale_torch",
    summary="Loss-scale rule of torch.amp.GradScaler.",
    equations=(
        "overflow: scale = fp32(scale backoff_factor);  growth_tracker = 0",
        "clean: growth_tracker + 1; where that equals growth_interval, growth_tracker = 0 and",
        "  grown = fp32(scale growth_factor); scale = grown if that is finite, else it stays.",
        "  A tracker past the interval never grows",
    ),
    controls=(
        controls.TORCH_SCALE,
        controls.GROWTH_TRACKER,
        controls.FOUND,
        controls.GROWTH_FACTOR,
        controls.BACKOFF_FACTOR,
        controls.GROWTH_INTERVAL,
    ),
    writes=("scale", "growth_tracker"),
    reference=update_scale_torch,
    combinations=combinations.SCALAR,
    laws=arguments.SCALER_LAWS,
    layouts=(),
    bound=Bound.EXACT,
    together=(controls.AT_CEILING,),
)
