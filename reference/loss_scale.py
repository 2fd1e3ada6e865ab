"""Loss-scale rules as pure state machines over Python numbers: (state, found_inf) -> state.

Static: the scale never moves. Dynamic: DeepSpeed's `DynamicLossScaler`, with hysteresis and a
floor. Wrapper: the smaller rule inside DeepSpeed's FP16 optimizers. Torch: `torch.amp.GradScaler`.

Every rule sees found_inf of the step that has just ended and gives the scale of the next one. A
step uses the scale its gradients were made with, so the update comes after the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch


@dataclass(frozen=True, kw_only=True)
class ScaleState:
    """The memory of all rules; a rule touches the scale and the counters that it `remembers`.

    Attributes:
        scale: the current loss scale.
        cur_iter: steps seen, skipped ones included.
        last_overflow_iter: `cur_iter` of the last overflow, -1 before the first.
        cur_hysteresis: overflows left; the scale shrinks while this is 1.
        growth_tracker: clean steps in a row.
        exhausted: set to 1 by an overflow at a floor that makes it an error.
    """

    scale: float
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 2
    growth_tracker: int = 0
    exhausted: int = 0


@dataclass(frozen=True, kw_only=True)
class StaticRule:
    """A scale that never moves; steps are counted."""

    remembers: ClassVar[tuple[str, ...]] = ("cur_iter",)

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a step."""
        del found_inf
        return replace(state, cur_iter=state.cur_iter + 1)


@dataclass(frozen=True, kw_only=True)
class DynamicRule:
    """Hysteresis and a floor.

    Attributes:
        scale_factor: what the scale is multiplied or divided by.
        scale_window: clean steps between two growths, at least 1.
        min_scale: the floor.
        delayed_shift: hysteresis, the overflow with this number shrinks the scale. 0 never does:
            the budget counts down past the value that triggers.
        consecutive_hysteresis: every clean step refills the hysteresis, not only a growth.
        raise_error_at_min_scale: an overflow at the floor is an error.
        growth_counts_this_step: the scale grows with clean step number scale_window, not after it;
            the rule of DeepSpeed 0.14.
    """

    remembers: ClassVar[tuple[str, ...]] = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    growth_counts_this_step: bool = False

    def __post_init__(self) -> None:
        _check_window("DynamicRule", self.scale_window)

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a step.

        Overflow with hysteresis left: spend one. Overflow with none left: scale = max(scale/factor,
        min_scale); shrinking refills nothing. At the floor that is an error: `exhausted` is 1 and
        nothing else changes; a scale *below* the floor is raised to it. Clean step: grow after a
        full window, which refills the hysteresis.
        """
        if found_inf:
            return self._after_overflow(state)
        clean = state.cur_iter - state.last_overflow_iter
        if self.growth_counts_this_step:
            grows = clean % self.scale_window == 0
        else:
            grows = is_full_window(clean - 1, self.scale_window)
        refills = self.consecutive_hysteresis or grows
        return replace(
            state,
            scale=state.scale * self.scale_factor if grows else state.scale,
            cur_hysteresis=self.delayed_shift if refills else state.cur_hysteresis,
            cur_iter=state.cur_iter + 1,
        )

    def _after_overflow(self, state: ScaleState) -> ScaleState:
        shrinks = self.delayed_shift == 1 or state.cur_hysteresis == 1
        if shrinks and state.scale == self.min_scale and self.raise_error_at_min_scale:
            return replace(state, exhausted=1)
        return replace(
            state,
            scale=max(state.scale / self.scale_factor, self.min_scale) if shrinks else state.scale,
            cur_hysteresis=state.cur_hysteresis if shrinks else state.cur_hysteresis - 1,
            last_overflow_iter=state.cur_iter,
            cur_iter=state.cur_iter + 1,
        )


@dataclass(frozen=True, kw_only=True)
class WrapperRule:
    """The rule inside DeepSpeed's FP16 optimizers: no hysteresis, and silent at the floor.

    Names are those of `DynamicRule`.
    """

    remembers: ClassVar[tuple[str, ...]] = ("cur_iter", "last_overflow_iter")
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_window("WrapperRule", self.scale_window)

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a step."""
        scale, last = state.scale, state.last_overflow_iter
        if found_inf:
            scale, last = max(scale / self.scale_factor, self.min_scale), state.cur_iter
        elif is_full_window(state.cur_iter - last - 1, self.scale_window):
            scale = scale * self.scale_factor
        return replace(state, scale=scale, last_overflow_iter=last, cur_iter=state.cur_iter + 1)


@dataclass(frozen=True, kw_only=True)
class TorchRule:
    """`torch.amp.GradScaler`, with its defaults; a scale that it has changed is an fp32 number."""

    remembers: ClassVar[tuple[str, ...]] = ("growth_tracker",)
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _check_window("TorchRule", self.growth_interval)

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a step.

        Overflow: scale * backoff_factor, without a floor. Clean step number growth_interval in a
        row: scale * growth_factor, unless that is infinite in fp32. The scale is rounded to fp32
        after each change; the product is formed in float64.
        """
        if found_inf:
            shrunk = _rounded_to_fp32(state.scale * self.backoff_factor)
            return replace(state, scale=shrunk, growth_tracker=0)
        clean = state.growth_tracker + 1
        if clean != self.growth_interval:
            return replace(state, growth_tracker=clean)
        grown = _rounded_to_fp32(state.scale * self.growth_factor)
        scale = grown if math.isfinite(grown) else state.scale
        return replace(state, scale=scale, growth_tracker=0)


Rule = StaticRule | DynamicRule | WrapperRule | TorchRule
Transition = Callable[[ScaleState, bool], ScaleState]


def is_full_window(clean: int, scale_window: int) -> bool:
    """True when the clean steps *before* this one are a positive multiple of the window.

    From a fresh start the first growth comes with clean step number window + 1.
    """
    return clean > 0 and clean % scale_window == 0


def _check_window(where: str, scale_window: int) -> None:
    if scale_window < 1:
        raise ValueError(f"scale_window={scale_window}, but should be at least 1 [{where}]")


def _rounded_to_fp32(x: float) -> float:
    rounded: float = torch.tensor(x, dtype=torch.float64).to(torch.float32).item()
    return rounded
