"""Loss-scale rules as pure state machines over Python numbers: one transition per optimizer step.

Static: the scale never moves. Dynamic: DeepSpeed's `DynamicLossScaler`, with hysteresis and a
floor. Wrapper: the smaller rule inside DeepSpeed's FP16 optimizers. Torch: `torch.amp.GradScaler`.

Every rule sees found_inf of the step that has just ended and gives the scale of the next one. A
step uses the scale its gradients were made with, so the update comes after the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from twinstep.contract.errors import MinimumLossScale

GrowthTest = Callable[[int, int, int], bool]


def grows_after_full_window(cur_iter: int, last_overflow_iter: int, scale_window: int) -> bool:
    """True when the clean steps *before* this one are a positive multiple of the window.

    From a fresh start the first growth comes with clean step number window + 1.
    """
    clean = cur_iter - last_overflow_iter - 1
    return clean > 0 and clean % scale_window == 0


def grows_with_full_window(cur_iter: int, last_overflow_iter: int, scale_window: int) -> bool:
    """True when the clean steps *with* this one are a multiple of the window.

    The rule of DeepSpeed 0.14: the first growth comes with clean step number window.
    """
    return (cur_iter - last_overflow_iter) % scale_window == 0


def _check_window(where: str, scale_window: int) -> None:
    if scale_window < 1:
        raise ValueError(f"scale_window={scale_window}, but should be at least 1 [{where}]")


@dataclass(frozen=True, kw_only=True)
class DynamicRule:
    """Constants of the dynamic rule.

    Attributes:
        scale_factor: what the scale is multiplied or divided by.
        scale_window: clean steps between two growths, at least 1.
        min_scale: the floor.
        delayed_shift: hysteresis, the overflow with this number shrinks the scale. 0 never does:
            the budget counts down past the value that triggers.
        consecutive_hysteresis: every clean step refills the hysteresis, not only a growth.
        raise_error_at_min_scale: an overflow at the floor is an error.
        growth_test: which clean steps let the scale grow.
    """

    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    growth_test: GrowthTest = grows_after_full_window

    def __post_init__(self) -> None:
        _check_window("DynamicRule", self.scale_window)


@dataclass(frozen=True, kw_only=True)
class DynamicState:
    """What the dynamic rule remembers.

    Attributes:
        scale: the current loss scale.
        cur_iter: steps seen, skipped ones included.
        last_overflow_iter: `cur_iter` of the last overflow, -1 before the first.
        cur_hysteresis: overflows left; the scale shrinks while this is 1.
    """

    scale: float
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 2


def update_static(scale: float, found_inf: bool) -> float:
    """Return the same scale, whatever happened."""
    del found_inf
    return scale


def update_dynamic(state: DynamicState, found_inf: bool, rule: DynamicRule) -> DynamicState:
    """One transition of the dynamic rule.

    Overflow with hysteresis left: spend one. Overflow with none left: scale = max(scale/factor,
    min_scale); shrinking refills nothing. Clean step: grow when the growth test says so, which
    refills the hysteresis.

    Raises:
        MinimumLossScale: overflow, no hysteresis left, the scale equals the floor and the rule says
            that this is an error. No state changes, so calling again raises again. A scale *below*
            the floor is not an error: it is raised to the floor.
    """
    if found_inf:
        return _dynamic_overflow(state, rule)
    grows = rule.growth_test(state.cur_iter, state.last_overflow_iter, rule.scale_window)
    refills = rule.consecutive_hysteresis or grows
    return replace(
        state,
        scale=state.scale * rule.scale_factor if grows else state.scale,
        cur_hysteresis=rule.delayed_shift if refills else state.cur_hysteresis,
        cur_iter=state.cur_iter + 1,
    )


def _dynamic_overflow(state: DynamicState, rule: DynamicRule) -> DynamicState:
    shrinks = rule.delayed_shift == 1 or state.cur_hysteresis == 1
    if shrinks and state.scale == rule.min_scale and rule.raise_error_at_min_scale:
        raise MinimumLossScale(
            f"gradients overflow at loss scale {state.scale}, which should be above its floor "
            f"min_scale={rule.min_scale} to shrink again [step {state.cur_iter}]"
        )
    return replace(
        state,
        scale=max(state.scale / rule.scale_factor, rule.min_scale) if shrinks else state.scale,
        cur_hysteresis=state.cur_hysteresis if shrinks else state.cur_hysteresis - 1,
        last_overflow_iter=state.cur_iter,
        cur_iter=state.cur_iter + 1,
    )


@dataclass(frozen=True, kw_only=True)
class WrapperRule:
    """Constants of the rule inside DeepSpeed's FP16 optimizers; names as in `DynamicRule`."""

    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_window("WrapperRule", self.scale_window)


@dataclass(frozen=True, kw_only=True)
class WrapperState:
    """What the wrapper rule remembers; names as in `DynamicState`."""

    scale: float
    cur_iter: int = 0
    last_overflow_iter: int = -1


def update_wrapper(state: WrapperState, found_inf: bool, rule: WrapperRule) -> WrapperState:
    """One transition of the wrapper rule: no hysteresis, and it stays at the floor silently."""
    scale, last = state.scale, state.last_overflow_iter
    if found_inf:
        scale, last = max(scale / rule.scale_factor, rule.min_scale), state.cur_iter
    elif grows_after_full_window(state.cur_iter, last, rule.scale_window):
        scale = scale * rule.scale_factor
    return WrapperState(scale=scale, cur_iter=state.cur_iter + 1, last_overflow_iter=last)


@dataclass(frozen=True, kw_only=True)
class TorchRule:
    """Constants of `torch.amp.GradScaler`, with its defaults."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _check_window("TorchRule", self.growth_interval)


@dataclass(frozen=True, kw_only=True)
class TorchState:
    """What torch's rule remembers: the scale, always an fp32 number, and clean steps in a row."""

    scale: float
    growth_tracker: int = 0


def update_torch(state: TorchState, found_inf: bool, rule: TorchRule) -> TorchState:
    """One transition of torch's rule.

    Overflow: scale * backoff_factor, without a floor. Clean step number growth_interval in a row:
    scale * growth_factor, unless that is infinite in fp32. The scale is rounded to fp32 after each
    change; the product is formed in float64.
    """
    if found_inf:
        return TorchState(scale=_rounded_to_fp32(state.scale * rule.backoff_factor))
    clean = state.growth_tracker + 1
    if clean != rule.growth_interval:
        return TorchState(scale=state.scale, growth_tracker=clean)
    grown = _rounded_to_fp32(state.scale * rule.growth_factor)
    return TorchState(scale=grown if math.isfinite(grown) else state.scale)


def _rounded_to_fp32(x: float) -> float:
    rounded: float = torch.tensor(x, dtype=torch.float64).to(torch.float32).item()
    return rounded
