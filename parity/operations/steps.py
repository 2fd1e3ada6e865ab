"""The optimizer steps, one row each.

The reference of `mixed_step` takes what its kernel takes, all rules side by side and written
arguments too, and calls the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

import twinstep.reference.adam
import twinstep.reference.mixed_step
import twinstep.reference.remainder
import twinstep.reference.sgd
from twinstep.contract.compat import CORRECT, Compat
from twinstep.parity.operations import arguments, combinations, controls
from twinstep.parity.operations.operation import Bound, Operation, Option
from twinstep.parity.operations.scales import scale_controls, scale_state
from twinstep.reference.loss_scale import DynamicRule, TorchRule, Transition, WrapperRule

ADAM_LINES = (
    "t = step + 1;  k1 = 1 - beta1^t;  k2 = 1 - beta2^t  (1 without bias correction)",
    "m = beta1 m + (1 - beta1) g",
    "v = beta2 v + ((1 - beta2) g) g",
    "u = (m / k1) / (sqrt(v / k2) + eps)",
)

SGD_STEP = Operation(
    name="sgd_step",
    summary="Stochastic gradient descent with momentum, one step.",
    equations=(
        "g = fp32(grad) factor",
        "g = g + weight_decay p",
        "b = g in the first step, later momentum b + (1 - dampening) g;  without momentums d = g",
        "d = g + momentum b with nesterov, otherwise b",
        "p = p - lr d;  copy = p rounded once",
    ),
    lists=(
        arguments.PARAMS,
        arguments.GRADS,
        arguments.MOMENTUMS,
        arguments.COPIES,
        arguments.STEPS,
    ),
    controls=(
        controls.LR,
        controls.MOMENTUM,
        controls.DAMPENING,
        controls.WEIGHT_DECAY,
        controls.FACTOR,
        controls.SKIP,
    ),
    options=(arguments.NESTEROV,),
    writes=("params", "momentums", "copies", "steps"),
    reference=twinstep.reference.sgd.sgd_step,
    combinations=combinations.step_combinations("momentums"),
    laws=arguments.STEP_LAWS,
    together=(
        controls.MOMENTUM_ALONE,
        controls.SGD,
        {**controls.SGD, **controls.UNSCALED},
        {**controls.SGD, **controls.UNSCALED, "nesterov": True},
    ),
)

ADAM_STEP = Operation(
    name="adam_step",
    summary="Adam with L2 weight decay, one step.",
    equations=(
        "g = fp32(grad) factor",
        "g = g + weight_decay p",
        *ADAM_LINES,
        "p = p - lr u;  copy = p rounded once",
    ),
    lists=(
        arguments.PARAMS,
        arguments.GRADS,
        arguments.EXP_AVGS,
        arguments.EXP_AVG_SQS,
        arguments.COPIES,
        arguments.STEPS,
    ),
    controls=(
        controls.LR,
        controls.BETA1,
        controls.BETA2,
        controls.EPS,
        controls.WEIGHT_DECAY,
        controls.FACTOR,
        controls.SKIP,
    ),
    options=(arguments.BIAS_CORRECTION,),
    writes=("params", "exp_avgs", "exp_avg_sqs", "copies", "steps"),
    reference=twinstep.reference.adam.adam_step,
    combinations=combinations.step_combinations("exp_avgs", "exp_avg_sqs"),
    laws=arguments.STEP_LAWS,
    together=(
        controls.BETAS,
        controls.LATER_BETAS,
        {**controls.ADAM, **controls.UNSCALED},
        {**controls.LANGUAGE, **controls.UNSCALED},
    ),
)

ADAMW_STEP = replace(
    ADAM_STEP,
    name="adamw_step",
    summary="Adam with decoupled weight decay, one step.",
    equations=(
        "g = fp32(grad) factor",
        *ADAM_LINES,
        "u = u + weight_decay p",
        "p = p - lr u;  copy = p rounded once",
    ),
    reference=twinstep.reference.adam.adamw_step,
)

ADAMW_REMAINDER_STEP = replace(
    ADAMW_STEP,
    name="adamw_remainder_step",
    summary="AdamW on bf16 weights whose fp32 masters are kept as 16-bit remainders, one step.",
    equations=(
        "bits(master) = 2^16 bits(p) + remainder  (mod 2^32)",
        "g = fp32(grad) factor",
        *ADAM_LINES,
        "u = u + weight_decay master",
        "master = master - lr u;  if it is NaN, bits(master) = 0x7FC00000",
        "bits(p) = (bits(master) + 2^15) div 2^16;  remainder = the lower 16 bits, signed",
    ),
    lists=(
        arguments.PARAMS,
        arguments.GRADS,
        arguments.EXP_AVGS,
        arguments.EXP_AVG_SQS,
        arguments.REMAINDERS,
        arguments.STEPS,
    ),
    writes=("params", "exp_avgs", "exp_avg_sqs", "remainders", "steps"),
    reference=twinstep.reference.remainder.adamw_remainder_step,
    combinations=combinations.remainder_combinations(),
    bound=Bound.EXACT,
    laws=arguments.without(arguments.STEP_LAWS, "every_output_written"),
)


def mixed_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    max_norm: Tensor,
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    cur_hysteresis: Tensor,
    growth_tracker: Tensor,
    exhausted: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
    delayed_shift: Tensor,
    backoff_factor: Tensor,
    norm: Tensor,
    found_inf: Tensor,
    adam_w_mode: bool,
    bias_correction: bool,
    rule: str,
    consecutive_hysteresis: bool,
    raise_error_at_min_scale: bool,
    compat: Compat = CORRECT,
) -> tuple[list[Tensor] | Tensor, ...]:
    """`reference.mixed_step.mixed_step`; a rule keeps the bits of other rules' counters.

    Raises:
        ValueError: the rule is unknown.
    """
    del norm, found_inf
    transition = _transition(
        rule,
        scale_factor=scale_factor.item(),
        scale_window=int(scale_window.item()),
        min_scale=min_scale.item(),
        delayed_shift=int(delayed_shift.item()),
        backoff_factor=backoff_factor.item(),
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
        growth_counts_this_step=compat.growth_counts_this_step,
    )
    result = twinstep.reference.mixed_step.mixed_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        copies,
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        max_norm=max_norm,
        scaling=scale_state(
            scale,
            cur_iter=cur_iter,
            last_overflow_iter=last_overflow_iter,
            cur_hysteresis=cur_hysteresis,
            growth_tracker=growth_tracker,
            exhausted=exhausted,
        ),
        rule=transition,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
        compat=compat,
    )
    scaling = scale_controls(result.scaling, *SCALE_COUNTERS)
    return (*result.lists, *scaling, result.norm, result.found_inf)


def _transition(
    rule: str,
    *,
    scale_factor: float,
    scale_window: int,
    min_scale: float,
    delayed_shift: int,
    backoff_factor: float,
    consecutive_hysteresis: bool,
    raise_error_at_min_scale: bool,
    growth_counts_this_step: bool,
) -> Transition:
    """The named rule with its constants; "torch" takes factor and window as its own."""
    dynamic = DynamicRule(
        scale_factor=scale_factor,
        scale_window=scale_window,
        min_scale=min_scale,
        delayed_shift=delayed_shift,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
        growth_counts_this_step=growth_counts_this_step,
    )
    wrapper = WrapperRule(scale_factor=scale_factor, scale_window=scale_window, min_scale=min_scale)
    of_torch = TorchRule(
        growth_factor=scale_factor, backoff_factor=backoff_factor, growth_interval=scale_window
    )
    rules: dict[str, Transition] = {
        "static": lambda state, found_inf: state,
        "dynamic": dynamic.after,
        "wrapper": wrapper.after,
        "torch": of_torch.after,
    }
    if rule not in rules:
        raise ValueError(f"rule={rule!r}, but should be one of {', '.join(rules)} [mixed_step]")
    return rules[rule]


SCALE_COUNTERS = (
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
    "growth_tracker",
    "exhausted",
)
MIXED_STEP = Operation(
    name="mixed_step",
    summary="One whole mixed-precision step: overflow, norm, unscale and clip, Adam, loss scale.",
    equations=(
        "found_inf = 1 if any stored gradient is inf or NaN, else 0",
        "n = fp32(sqrt(exact sum of grad^2));  norm = fp32(float64(n) / scale)",
        "factor = clip_factor(n, scale, max_norm) with the scale as it came",
        "unless found_inf: adamw_step or adam_step with that factor",
        "loss scale: update_scale_<rule>; static changes nothing",
        "torch: growth_factor is scale_factor, growth_interval is scale_window",
    ),
    lists=ADAM_STEP.lists,
    controls=(
        controls.LR,
        controls.BETA1,
        controls.BETA2,
        controls.EPS,
        controls.WEIGHT_DECAY,
        controls.MAX_NORM,
        controls.STEP_SCALE,
        controls.CUR_ITER,
        controls.LAST_OVERFLOW,
        controls.HYSTERESIS,
        controls.GROWTH_TRACKER,
        controls.EXHAUSTED,
        controls.SCALE_FACTOR,
        controls.SCALE_WINDOW,
        controls.MIN_SCALE,
        controls.DELAYED_SHIFT,
        controls.BACKOFF_FACTOR,
        controls.NORM_OUT,
        controls.FOUND_OUT,
    ),
    options=(
        Option(name="adam_w_mode", choices=(True, False)),
        arguments.BIAS_CORRECTION,
        arguments.RULE,
        arguments.CONSECUTIVE,
        arguments.RAISE_AT_MIN,
    ),
    writes=(
        *ADAM_STEP.writes,
        "scale",
        *SCALE_COUNTERS,
        "norm",
        "found_inf",
    ),
    reference=mixed_step,
    combinations=combinations.step_combinations("exp_avgs", "exp_avg_sqs"),
    # Pieces of a large tensor alone do not make its norm.
    laws=arguments.without(arguments.STEP_LAWS, "large_index"),
    together=(
        controls.BETAS,
        controls.LATER_BETAS,
        {**controls.ADAM, **controls.CLIPPED},
        {**controls.LANGUAGE, **controls.UNSCALED_CLIPPED},
        {**controls.AT_FLOOR, "rule": "dynamic", "raise_error_at_min_scale": True},
        {**controls.AT_FLOOR, "rule": "dynamic", "raise_error_at_min_scale": False},
    ),
)
