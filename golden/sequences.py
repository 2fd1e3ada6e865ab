"""The situations that are recorded, as data: a rule, its constants and a sequence of overflows.

In a sequence g is a clean step and o an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = float | int | bool


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One run of a scaler.

    Attributes:
        name: says what happens in it.
        rule: "dynamic", "wrapper", "wrapper_step" (whole steps, not the rule alone), "torch", or
            one of `golden.record_wrappers`.
        scale: before the first step.
        constants: what the scaler is constructed with, besides the scale.
        steps: one letter per step.
    """

    name: str
    rule: str
    scale: float
    constants: Mapping[str, Value]
    steps: str


def dynamic(name: str, scale: float, steps: str, **changed: Value) -> Situation:
    """A run of the rule with hysteresis; constants not named have DeepSpeed's usual values."""
    constants: dict[str, Value] = {
        "scale_window": 1000,
        "min_scale": 1.0,
        "delayed_shift": 1,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
    }
    return Situation(
        name=name, rule="dynamic", scale=scale, constants={**constants, **changed}, steps=steps
    )


def wrapper(name: str, scale: float, steps: str, window: int, min_scale: float) -> Situation:
    """A run of the wrappers' rule."""
    constants: dict[str, Value] = {"scale_window": window, "min_scale": min_scale}
    return Situation(name=name, rule="wrapper", scale=scale, constants=constants, steps=steps)


def wrapper_step(name: str, scale: float, steps: str, window: int) -> Situation:
    """Whole steps of four weights: plain gradient descent, learning rate 1, true gradient 1."""
    constants: dict[str, Value] = {"scale_window": window, "min_scale": 1.0}
    return Situation(name=name, rule="wrapper_step", scale=scale, constants=constants, steps=steps)


def whole_step(
    rule: str, name: str, scale: float, steps: str, window: int = 1000, **changed: Value
) -> Situation:
    """Whole steps of a wrapper around plain gradient descent; see `golden.record_wrappers`.

    In `steps` z is a step with zero gradients.
    """
    constants: dict[str, Value] = {"scale_window": window, "min_scale": 1.0, "clip_grad": 0.0}
    constants |= {"external": 0.0, "norm_type": 2.0, "weight_decay": 0.0}
    return Situation(
        name=name, rule=rule, scale=scale, constants={**constants, **changed}, steps=steps
    )


def torch_scaler(name: str, scale: float, steps: str, interval: int, **changed: Value) -> Situation:
    """A run of torch's scaler."""
    usual: dict[str, Value] = {"growth_factor": 2.0, "backoff_factor": 0.5}
    constants = {**usual, "growth_interval": interval, **changed}
    return Situation(name=name, rule="torch", scale=scale, constants=constants, steps=steps)


SITUATIONS = (
    dynamic("window_of_two", 16.0, "gggggggogggggg", scale_window=2),
    dynamic("window_of_one", 4.0, "ggogog", scale_window=1),
    dynamic("hysteresis_spent_then_floor", 4.0, "oooooo", delayed_shift=3),
    dynamic("floor_without_error", 4.0, "oooogo", raise_error_at_min_scale=False),
    dynamic(
        "hysteresis_refilled_by_clean_steps",
        16.0,
        "ogoogoggggg",
        scale_window=3,
        delayed_shift=2,
        consecutive_hysteresis=True,
    ),
    dynamic("hysteresis_refilled_by_growth", 16.0, "ogooggggoo", scale_window=3, delayed_shift=2),
    dynamic("below_the_floor", 0.5, "oog"),
    dynamic("empty_budget", 8.0, "ooooo", delayed_shift=0),
    # No overflow at infinity: DeepSpeed's log line cannot convert infinity to an integer.
    dynamic("growth_to_infinity", 2.0**1022, "ggggg", scale_window=1),
    wrapper("window_of_two", 4.0, "ggggggo", 2, 1.0),
    wrapper("silent_at_the_floor", 4.0, "ooooggggo", 3, 1.0),
    wrapper("fractional_floor", 1.0, "oooog", 1000, 0.25),
    wrapper("below_the_floor", 0.5, "og", 1000, 1.0),
    wrapper_step("growth_halves_the_gradient", 4.0, "ggggggogg", 2),
    whole_step("flat_step", "external_scale_stays", 4.0, "ggog", external=8.0),
    whole_step("flat_step", "construction_decays", 4.0, "gg", weight_decay=0.5),
    whole_step("flat_step", "clipped", 4.0, "ggogg", clip_grad=0.5),
    whole_step("unfused_step", "growth_halves_the_gradient", 4.0, "ggggggogg", 2),
    whole_step("lamb_step", "divisor_of_lamb", 4.0, "gogg", clip_grad=0.5),
    whole_step("bf16_step", "overflow_is_skipped", 1.0, "ggogg"),
    whole_step("bf16_step", "zero_norm_is_a_step", 1.0, "gzg"),
    whole_step("bf16_step", "clipped", 1.0, "ggogg", clip_grad=0.5),
    whole_step("bf16_step", "norm_of_type_one", 1.0, "gg", norm_type=1.0),
    whole_step("bf16_step", "largest_gradient", 1.0, "gg", norm_type=float("inf")),
    torch_scaler("interval_of_two", 4.0, "gggggoggg", 2),
    torch_scaler("no_growth_past_fp32", 3e38, "gggg", 2),
    torch_scaler("no_floor", 2.0**-147, "ooooog", 1),
    torch_scaler("odd_factors", 65536.0, "ggogggog", 2, growth_factor=1.1, backoff_factor=0.3),
)
