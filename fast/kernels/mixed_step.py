"""A whole mixed-precision Adam step: reduce, finalise, update.

    found_inf = 1 if any gradient is not finite
    norm      = norm of the scaled gradients / scale
    factor    = clip_factor(scaled norm, scale), with the scale that the gradients were made with
    p, m, v   = Adam or AdamW with that factor, unless found_inf
    scale     = the loss-scale rule, after the step

Versions, and what each costs with 16-bit gradients and copies: one; three launches, 2 + 28 bytes
per parameter. Tensors of several dtype combinations take one reduce launch for each gradient
dtype and one update launch for each combination. The host decides nothing and waits for nothing,
so that the step can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.contract.loss_scale import check_rule
from twinstep.fast.kernels._arith import HEADER
from twinstep.fast.kernels.adam import update_adam
from twinstep.fast.kernels.finalise import CONTROLS, Finish, finalise
from twinstep.fast.kernels.reduce import new_limbs, reduce_gradients
from twinstep.fast.runtime.checks import require_step


def new_coefficients(device: torch.device, tensors: int) -> Tensor:
    """Return room for the coefficients of this many tensors."""
    return torch.empty(HEADER.value + 2 * tensors, dtype=torch.float32, device=device)


def mixed_step_(
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
) -> None:
    """Take one step from scaled gradients to weights, moments, copies and loss scale.

    Args:
        params: this and the lists that follow as in `fast.kernels.adam.adam_step_`.
        grads: gradients of the scaled loss.
        exp_avgs: first moments; written.
        exp_avg_sqs: second moments; written.
        copies: low-precision model weights, or an empty list; written.
        steps: completed steps; written.
        lr: this and the four that follow as in `fast.kernels.adam.adam_step_`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added outside the square root.
        weight_decay: L2 or decoupled, by adam_w_mode.
        max_norm: largest norm of the unscaled gradients, 0 or less for any; float64.
        scale: the loss scale, float64; written, like the five counters (int64) that follow, as
            far as the rule has them; see `fast.kernels.loss_scale`.
        cur_iter: steps seen.
        last_overflow_iter: cur_iter of the last overflow, or -1.
        cur_hysteresis: overflows left before the scale shrinks.
        growth_tracker: clean steps in a row.
        exhausted: 1 after an overflow at the floor.
        scale_factor: growth of the scale; of torch's rule the growth factor.
        scale_window: clean steps between growths; of torch's rule the growth interval.
        min_scale: floor of shrinking.
        delayed_shift: full hysteresis.
        backoff_factor: of torch's rule.
        norm: fp32; written: the norm of the unscaled gradients.
        found_inf: fp32; written: 1.0 if the step was skipped, else 0.0.
        adam_w_mode: True for AdamW, False for Adam with L2 decay.
        bias_correction: False uses 1 for both corrections.
        rule: "static", "dynamic", "wrapper" or "torch".
        consecutive_hysteresis: of the dynamic rule.
        raise_error_at_min_scale: of the dynamic rule.

    Raises:
        TypeError: a dtype is not as in `fast.kernels.adam.adam_step_`.
        ValueError: the rule is unknown; lengths, shapes or devices differ; not contiguous.
        RuntimeError: nothing here can run kernels on that device.
    """
    check_rule(rule, "mixed_step_")
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "max_norm": max_norm, "scale": scale}
    controls |= {"cur_iter": cur_iter, "last_overflow_iter": last_overflow_iter}
    controls |= {"cur_hysteresis": cur_hysteresis, "growth_tracker": growth_tracker}
    controls |= {"exhausted": exhausted, "scale_factor": scale_factor}
    controls |= {"scale_window": scale_window, "min_scale": min_scale}
    controls |= {"delayed_shift": delayed_shift, "backoff_factor": backoff_factor}
    controls |= {"norm": norm, "found_inf": found_inf}
    require_step("mixed_step_", lists, steps, controls)
    finish = Finish(
        rule=rule,
        bias_correction=bias_correction,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
    )
    limbs, coefficients = new_limbs(scale.device), new_coefficients(scale.device, len(steps))
    reduce_gradients(grads, limbs)
    finalise(limbs, steps, coefficients, [controls[name] for name in CONTROLS], finish)
    *required, _ = lists.values()
    update_adam(
        [*required, *([copies] if len(copies) else [])], coefficients, decoupled=adam_w_mode
    )
