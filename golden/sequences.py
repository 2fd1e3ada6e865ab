"""The situations of scalers that are recorded: a rule, its constants and a sequence of overflows.

In a sequence g is a clean step, o an overflow (an infinity), n one by a NaN, z a step with zero
gradients. R saves the state and goes on with a new object that has loaded it; X sets the scale to
the constant `override`; neither takes a step. Whole steps are those of four weights: plain gradient
descent, learning rate 1, true gradient 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinstep.golden.trace import Constant


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One run of a scaler.

    Attributes:
        name: what happens in it.
        rule: "dynamic", "wrapper", "wrapper_step" (whole steps, not the rule alone), "torch",
            "static", one of `golden.record_wrappers` or of `golden.runs`.
        scale: before the first step.
        constants: what the scaler is constructed with, besides the scale.
        steps: one letter per step.
        differs: where our default knowingly differs, with the id of the edge.
        differs_in: fields of a step that differ there.
        untaken: why no path of the fast side can replay it; empty where one can.
    """

    name: str
    rule: str
    scale: float
    constants: Mapping[str, Constant]
    steps: str
    differs: str = ""
    differs_in: tuple[str, ...] = ()
    untaken: str = ""


STEP: Mapping[str, Constant] = {"scale_window": 1000, "min_scale": 1.0}
WHOLE_STEP: Mapping[str, Constant] = {
    **STEP,
    "clip_grad": 0.0,
    "external": 0.0,
    "norm_type": 2.0,
    "weight_decay": 0.0,
}
# What a rule is constructed with where a situation does not name it: DeepSpeed's usual values.
USUAL: Mapping[str, Mapping[str, Constant]] = {
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
    "static": {},
}
TWO: Mapping[str, Constant] = {"delayed_shift": 2}
REFILLED: Mapping[str, Constant] = {"consecutive_hysteresis": True}
TRUE_NORM = "edge UF-1: by default the norm is that of the true gradients"
WHOLE = "edge LS-1: by default the gradient of a growth step is applied whole"
DIVIDED = "edge LS-2: by default what multiplied the loss is divided out"
QUIET = "edge FP-1: by default construction changes nothing"


def run(
    rule: str,
    name: str,
    scale: float,
    steps: str,
    *,
    differs: str = "",
    differs_in: str = "",
    **changed: Constant,
) -> Situation:
    """One run, with the constants of its rule that are not the usual ones."""
    return Situation(
        name=name,
        rule=rule,
        scale=scale,
        constants={**USUAL[rule], **changed},
        steps=steps,
        differs=differs,
        differs_in=tuple(differs_in.split()),
    )


def plain(
    rule: str, name: str, scale: float, steps: str, changed: Mapping[str, Constant]
) -> Situation:
    """One run that our default repeats, as `run`."""
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
    run(
        "wrapper_step",
        "growth_halves_the_gradient",
        4.0,
        "ggggggogg",
        scale_window=2,
        differs=WHOLE,
        differs_in="applied norm",
    ),
    run(
        "flat_step",
        "external_scale_stays",
        4.0,
        "ggog",
        external=8.0,
        differs=DIVIDED,
        differs_in="applied norm weight",
    ),
    run(
        "flat_step",
        "construction_decays",
        4.0,
        "gg",
        weight_decay=0.5,
        differs=QUIET,
        differs_in="applied weight",
    ),
    run("flat_step", "clipped", 4.0, "ggogg", clip_grad=0.5),
    run(
        "unfused_step",
        "growth_halves_the_gradient",
        4.0,
        "ggggggogg",
        scale_window=2,
        differs=TRUE_NORM,
        differs_in="applied norm weight",
    ),
    run(
        "lamb_step",
        "divisor_of_lamb",
        4.0,
        "gogg",
        clip_grad=0.5,
        differs=TRUE_NORM,
        differs_in="norm",
    ),
    run("bf16_step", "overflow_is_skipped", 1.0, "ggogg"),
    run("bf16_step", "zero_norm_is_a_step", 1.0, "gzg"),
    run("bf16_step", "clipped", 1.0, "ggogg", clip_grad=0.5),
    run("bf16_step", "norm_of_type_one", 1.0, "gg", norm_type=1.0),
    run("bf16_step", "largest_gradient", 1.0, "gg", norm_type=float("inf")),
    run("torch", "interval_of_two", 4.0, "gggggoggg"),
    run("torch", "no_growth_past_fp32", 3e38, "gggg"),
    run("torch", "no_floor", 2.0**-147, "ooooog", growth_interval=1),
    run("torch", "odd_factors", 65536.0, "ggogggog", growth_factor=1.1, backoff_factor=0.3),
    *(
        plain("torch", name, scale, steps, constants)
        for name, scale, steps, constants in (
            ("overflow_at_the_first_step", 16.0, "ogggg", {}),
            ("burst", 65536.0, "ggooooogggggg", {"growth_interval": 3}),
            ("overflow_at_the_windows_edge", 16.0, "ggogggoggg", {"growth_interval": 3}),
            ("nan_counts_as_infinity", 16.0, "gngongg", {}),
            ("interval_of_one", 1.0, "ggogno", {"growth_interval": 1}),
            ("resumed_within_a_window", 16.0, "ggRggogRggg", {"growth_interval": 3}),
            ("set_in_mid_run", 16.0, "gXggoXgg", {"override": 3.0}),
            ("rounded_to_fp32", 1.0, "gogogogg", {"backoff_factor": 0.7, "growth_interval": 1}),
        )
    ),
    run("static", "never_moves", 3.5, "gogog"),
    *(
        plain("dynamic", name, scale, steps, constants)
        for name, scale, steps, constants in (
            ("overflow_at_the_first_step", 16.0, "ogggg", {"scale_window": 2}),
            ("burst", 64.0, "ggoooogggg", {"scale_window": 2}),
            ("overflow_at_the_windows_edge", 16.0, "gggoggggoggg", {"scale_window": 3}),
            ("odd_floor", 8.0, "oooogg", {"min_scale": 3.0, "raise_error_at_min_scale": False}),
            ("resumed_within_a_window", 16.0, "oggRgggRoo", {"scale_window": 3, **TWO}),
            ("set_in_mid_run", 16.0, "gXgogXoo", {"scale_window": 2, "override": 5.0}),
        )
    ),
    # The situations of DeepSpeed's own tests of dynamic scales and of hysteresis, written anew:
    # golden/README.md has the table.
    *(
        plain("wrapper", f"upstream_{name}", scale, steps, constants)
        for name, scale, steps, constants in (
            ("fused_no_overflow", 256.0, "gggggggggg", {"scale_window": 2}),
            ("fused_all_overflow", 16.0, "oooooooo", {"scale_window": 2}),
            ("fused_some_overflow", 256.0, "oogggo", {"scale_window": 2}),
            ("unfused_no_overflow", 256.0, "gggggggggg", {"scale_window": 2}),
            ("unfused_all_overflow", 16.0, "oooooooo", {"scale_window": 2, "min_scale": 2.0}),
            ("unfused_some_overflow", 256.0, "oogggo", {"scale_window": 2}),
        )
    ),
    *(
        plain("dynamic", f"upstream_{name}", 256.0, steps, {"scale_window": window, **constants})
        for name, window, steps, constants in (
            ("no_overflow", 2, "gggggggggg", TWO),
            ("all_overflow", 2, "oooooooooo", TWO),
            ("some_overflow", 2, "oogggogggo", TWO),
            ("hysteresis_of_three", 2, "oooogggoo", {"delayed_shift": 3}),
            ("first_of_two_is_forgiven", 2, "ogg", TWO),
            ("two_in_a_row_shrink", 2, "oog", TWO),
            ("refilled_only_by_growth", 3, "ogogogggoo", TWO),
            ("refilled_by_every_step", 3, "ogogogogoo", {**TWO, **REFILLED}),
            ("spent_and_refilled", 2, "ooggggoo", {**TWO, **REFILLED}),
            ("one_is_no_hysteresis", 2, "ogoggg", {}),
            ("zero_all_overflow", 2, "oooooooo", {}),
            ("zero_some_overflow", 2, "oogggo", {}),
            ("survives_a_checkpoint", 1000, "oRoo", {"delayed_shift": 3}),
            ("through_an_engine", 100, "oRo", TWO),
        )
    ),
)
