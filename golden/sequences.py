"""The situations that are recorded, as data: a rule, its constants and a sequence of overflows.

In a sequence g is a clean step, o an overflow, and z a step with zero gradients. Whole steps are
those of four weights: plain gradient descent, learning rate 1, true gradient 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = float | int | bool


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One run of a scaler.

    Attributes:
        name: what happens in it.
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


STEP: Mapping[str, Value] = {"scale_window": 1000, "min_scale": 1.0}
WHOLE_STEP: Mapping[str, Value] = {
    **STEP,
    "clip_grad": 0.0,
    "external": 0.0,
    "norm_type": 2.0,
    "weight_decay": 0.0,
}
# What a rule is constructed with where a situation does not name it: DeepSpeed's usual values.
USUAL: Mapping[str, Mapping[str, Value]] = {
    "dynamic": {
        **STEP,
        "delayed_shift": 1,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
    },
    "wrapper": STEP,
    "wrapper_step": STEP,
    "flat_step": WHOLE_STEP,
    "unfused_step": WHOLE_STEP,
    "lamb_step": WHOLE_STEP,
    "bf16_step": WHOLE_STEP,
    "torch": {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
}


def run(rule: str, name: str, scale: float, steps: str, **changed: Value) -> Situation:
    """One run, with the constants of its rule that are not the usual ones."""
    constants = {**USUAL[rule], **changed}
    return Situation(name=name, rule=rule, scale=scale, constants=constants, steps=steps)


SITUATIONS = (
    run("dynamic", "window_of_two", 16.0, "gggggggogggggg", scale_window=2),
    run("dynamic", "window_of_one", 4.0, "ggogog", scale_window=1),
    run("dynamic", "hysteresis_spent_then_floor", 4.0, "oooooo", delayed_shift=3),
    run("dynamic", "floor_without_error", 4.0, "oooogo", raise_error_at_min_scale=False),
    run(
        "dynamic",
        "hysteresis_refilled_by_clean_steps",
        16.0,
        "ogoogoggggg",
        scale_window=3,
        delayed_shift=2,
        consecutive_hysteresis=True,
    ),
    run(
        "dynamic",
        "hysteresis_refilled_by_growth",
        16.0,
        "ogooggggoo",
        scale_window=3,
        delayed_shift=2,
    ),
    run("dynamic", "below_the_floor", 0.5, "oog"),
    run("dynamic", "empty_budget", 8.0, "ooooo", delayed_shift=0),
    # No overflow at infinity: DeepSpeed's log line cannot convert infinity to an integer.
    run("dynamic", "growth_to_infinity", 2.0**1022, "ggggg", scale_window=1),
    run("wrapper", "window_of_two", 4.0, "ggggggo", scale_window=2),
    run("wrapper", "silent_at_the_floor", 4.0, "ooooggggo", scale_window=3),
    run("wrapper", "fractional_floor", 1.0, "oooog", min_scale=0.25),
    run("wrapper", "below_the_floor", 0.5, "og"),
    run("wrapper_step", "growth_halves_the_gradient", 4.0, "ggggggogg", scale_window=2),
    run("flat_step", "external_scale_stays", 4.0, "ggog", external=8.0),
    run("flat_step", "construction_decays", 4.0, "gg", weight_decay=0.5),
    run("flat_step", "clipped", 4.0, "ggogg", clip_grad=0.5),
    run("unfused_step", "growth_halves_the_gradient", 4.0, "ggggggogg", scale_window=2),
    run("lamb_step", "divisor_of_lamb", 4.0, "gogg", clip_grad=0.5),
    run("bf16_step", "overflow_is_skipped", 1.0, "ggogg"),
    run("bf16_step", "zero_norm_is_a_step", 1.0, "gzg"),
    run("bf16_step", "clipped", 1.0, "ggogg", clip_grad=0.5),
    run("bf16_step", "norm_of_type_one", 1.0, "gg", norm_type=1.0),
    run("bf16_step", "largest_gradient", 1.0, "gg", norm_type=float("inf")),
    run("torch", "interval_of_two", 4.0, "gggggoggg"),
    run("torch", "no_growth_past_fp32", 3e38, "gggg"),
    run("torch", "no_floor", 2.0**-147, "ooooog", growth_interval=1),
    run("torch", "odd_factors", 65536.0, "ggogggog", growth_factor=1.1, backoff_factor=0.3),
)
