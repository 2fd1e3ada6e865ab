"""The optimizer steps, one row each."""

from __future__ import annotations

from dataclasses import replace

import twinstep.reference.adam
import twinstep.reference.lamb
import twinstep.reference.mixed_step
import twinstep.reference.sgd
from twinstep.parity.operations import arguments, combinations, controls
from twinstep.parity.operations.operation import Operation, Option

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

LAMB_STEP = Operation(
    name="lamb_step",
    summary="LAMB: Adam's direction, its length bounded by the norm of each tensor, one step.",
    equations=(
        "t = step + 1;  h = fp32(grad) factor",
        "m = beta1 m + (1 - beta1) h",
        "v = beta2 v + ((1 - beta2) h) h",
        "u = m / (sqrt(v) + eps);  with eps_inside_sqrt m / sqrt(v + eps)",
        "u = u + weight_decay p",
        "w = fp32(sqrt(exact sum of p^2));  n = fp32(sqrt(exact sum of u^2)), each of one tensor",
        "rho = max(min(w / n, max_coeff), min_coeff);  exactly 1 if w = 0 or n = 0",
        "a = (lr sqrt(1 - beta2^t)) / (1 - beta1^t), float64 rounded once;  lr without correction",
        "p = p - (a rho) u;  copy = p rounded once",
    ),
    lists=ADAM_STEP.lists,
    controls=(
        controls.LR,
        controls.BETA1,
        controls.BETA2,
        controls.EPS,
        controls.WEIGHT_DECAY,
        controls.MAX_COEFF,
        controls.MIN_COEFF,
        controls.FACTOR,
        controls.SKIP,
    ),
    options=(arguments.BIAS_CORRECTION, arguments.EPS_INSIDE),
    writes=ADAM_STEP.writes,
    reference=twinstep.reference.lamb.lamb_step,
    combinations=ADAM_STEP.combinations,
    # The trust ratio is that of a whole tensor.
    laws=arguments.without(arguments.STEP_LAWS, "splitting", "large_index"),
    whole_tensors=True,
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
        "cur_iter",
        "last_overflow_iter",
        "cur_hysteresis",
        "growth_tracker",
        "exhausted",
        "norm",
        "found_inf",
    ),
    reference=twinstep.reference.mixed_step.mixed_step,
    combinations=combinations.step_combinations("exp_avgs", "exp_avg_sqs"),
    # Both ends of a large tensor alone do not make its norm.
    laws=arguments.without(arguments.STEP_LAWS, "large_index"),
)
