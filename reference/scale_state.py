"""The loss-scale state of a whole step: every rule's state side by side, and the choice of rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from twinstep.contract.loss_scale import check_rule
from twinstep.reference.loss_scale import GrowthTest, grows_after_full_window
from twinstep.reference.update_scale import (
    update_scale_dynamic,
    update_scale_torch,
    update_scale_wrapper,
)


@dataclass(frozen=True, kw_only=True)
class ScaleState:
    """State of all rules; a rule touches only its own fields. Shapes (), scale float64, else int64.

    Attributes:
        scale: the loss scale.
        cur_iter: steps seen ("dynamic", "wrapper").
        last_overflow_iter: cur_iter of the last overflow, or -1 ("dynamic", "wrapper").
        cur_hysteresis: overflows left before the scale shrinks ("dynamic").
        growth_tracker: clean steps in a row ("torch").
        exhausted: 1 after an overflow at the floor ("dynamic").
    """

    scale: Tensor
    cur_iter: Tensor
    last_overflow_iter: Tensor
    cur_hysteresis: Tensor
    growth_tracker: Tensor
    exhausted: Tensor

    def in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Copies of all fields, in the order in which they are declared."""
        return (
            self.scale.clone(),
            self.cur_iter.clone(),
            self.last_overflow_iter.clone(),
            self.cur_hysteresis.clone(),
            self.growth_tracker.clone(),
            self.exhausted.clone(),
        )


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """A rule by name and the constants of all rules, as in `reference.loss_scale`."""

    name: str
    scale_factor: Tensor
    scale_window: Tensor
    min_scale: Tensor
    delayed_shift: Tensor
    backoff_factor: Tensor
    consecutive_hysteresis: bool
    raise_error_at_min_scale: bool
    growth_test: GrowthTest = grows_after_full_window

    def __post_init__(self) -> None:
        check_rule(self.name, "mixed_step")


def advance(state: ScaleState, rule: ScaleRule, found_inf: Tensor) -> ScaleState:
    """One transition of the named rule; fields of other rules keep their bits."""
    if rule.name == "dynamic":
        return _dynamic(state, rule, found_inf)
    if rule.name == "wrapper":
        scale, cur_iter, last = update_scale_wrapper(
            scale=state.scale,
            cur_iter=state.cur_iter,
            last_overflow_iter=state.last_overflow_iter,
            found_inf=found_inf,
            scale_factor=rule.scale_factor,
            scale_window=rule.scale_window,
            min_scale=rule.min_scale,
        )
        return replace(state, scale=scale, cur_iter=cur_iter, last_overflow_iter=last)
    if rule.name == "torch":
        scale, tracker = update_scale_torch(
            scale=state.scale,
            growth_tracker=state.growth_tracker,
            found_inf=found_inf,
            growth_factor=rule.scale_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.scale_window,
        )
        return replace(state, scale=scale, growth_tracker=tracker)
    return state


def _dynamic(state: ScaleState, rule: ScaleRule, found_inf: Tensor) -> ScaleState:
    scale, cur_iter, last, hysteresis, exhausted = update_scale_dynamic(
        scale=state.scale,
        cur_iter=state.cur_iter,
        last_overflow_iter=state.last_overflow_iter,
        cur_hysteresis=state.cur_hysteresis,
        exhausted=state.exhausted,
        found_inf=found_inf,
        scale_factor=rule.scale_factor,
        scale_window=rule.scale_window,
        min_scale=rule.min_scale,
        delayed_shift=rule.delayed_shift,
        consecutive_hysteresis=rule.consecutive_hysteresis,
        raise_error_at_min_scale=rule.raise_error_at_min_scale,
        growth_test=rule.growth_test,
    )
    return replace(
        state,
        scale=scale,
        cur_iter=cur_iter,
        last_overflow_iter=last,
        cur_hysteresis=hysteresis,
        exhausted=exhausted,
    )
