"""Both LAMBs, DeepSpeed's and apex's, one row each."""

from __future__ import annotations

from dataclasses import replace

import twinstep.reference.apex_lamb
import twinstep.reference.lamb
from twinstep.parity.operations import arguments, controls
from twinstep.parity.operations.operation import Operation, Option
from twinstep.parity.operations.steps import ADAM_STEP

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
    laws=arguments.without(arguments.STEP_LAWS, "splitting"),
    whole_tensors=True,
    together=ADAM_STEP.together,
)

APEX_LAMB_STEP = replace(
    LAMB_STEP,
    name="apex_lamb_step",
    summary="apex's LAMB: Adam's corrected direction, clipped by the norm of all gradients.",
    equations=(
        "t = step + 1;  k1 = 1 - beta1^t;  k2 = 1 - beta2^t  (1 without bias correction)",
        "n = norm factor;  c = n / fp32(max_norm) if n > fp32(max_norm) > 0, else 1",
        "h = (fp32(grad) factor) / c;  without adam_w_mode h = h + weight_decay p",
        "m = beta1 m + beta3 h,  beta3 = 1 - beta1 with grad_averaging, else 1",
        "v = beta2 v + ((1 - beta2) h) h",
        "u = (m / k1) / (sqrt(v / k2) + eps);  with adam_w_mode u = u + weight_decay p",
        "w = fp32(sqrt(exact sum of p^2));  n = fp32(sqrt(exact sum of u^2)), each of one tensor",
        "rho = w / n;  1 if w = 0 or n = 0, or if weight_decay = 0 without use_nvlamb",
        "p = p - (lr rho) u;  copy = p rounded once",
    ),
    controls=(
        controls.LR,
        controls.BETA1,
        controls.BETA2,
        controls.EPS,
        controls.WEIGHT_DECAY,
        controls.MAX_NORM_OF_ALL,
        controls.NORM,
        controls.FACTOR,
        controls.SKIP,
    ),
    options=(
        arguments.BIAS_CORRECTION,
        Option(name="adam_w_mode", choices=(True, False)),
        Option(name="grad_averaging", choices=(True, False)),
        Option(name="use_nvlamb", choices=(False, True)),
    ),
    reference=twinstep.reference.apex_lamb.apex_lamb_step,
    together=(
        *ADAM_STEP.together,
        controls.WITHOUT_DECAY,
        controls.NVLAMB,
        {**controls.ADAM, **controls.UNCLIPPED},
    ),
)
