"""One whole mixed-precision step: overflow test, norm, unscale and clip, Adam, loss scale.

    found_inf = 1 if any gradient is non-finite
    n         = norm of the gradients as stored (still scaled)
    factor    = clip_factor(n, scale)                      one multiplication unscales and clips
    p, m, v   = Adam or AdamW with that factor             unless found_inf
    scale     = the loss-scale rule, after the step

The step uses the scale that its gradients were made with, and the new scale is for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.arithmetic import fp32, fp64
from twinstep.reference.clip import clip_factor, l2_norm
from twinstep.reference.compat import growth_test, state_to_unscale_with
from twinstep.reference.overflow import any_nonfinite
from twinstep.reference.scale_state import ScaleRule, ScaleState, advance

MixedResult = tuple[
    list[Tensor],
    list[Tensor],
    list[Tensor],
    list[Tensor],
    list[Tensor],
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
]


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
) -> MixedResult:
    """One step from scaled gradients to new weights, moments and loss scale.

    Args:
        params: as in `reference.adam.adam_step`, like the lists that follow.
        grads: gradients of the scaled loss; fp32, fp16 or bf16.
        exp_avgs: first moments, fp32.
        exp_avg_sqs: second moments, fp32.
        copies: low-precision model weights, or an empty list.
        steps: completed steps of each parameter, int64, shape ().
        lr: learning rate, like the following controls float64, shape ().
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added outside the square root.
        weight_decay: L2 or decoupled, by adam_w_mode.
        max_norm: largest norm of the unscaled gradients; 0 or below disables clipping.
        scale: the loss scale the gradients were made with.
        cur_iter: steps seen by the loss-scale rule, int64, like the following counters.
        last_overflow_iter: cur_iter of the last overflow, or -1.
        cur_hysteresis: overflows left before the scale shrinks ("dynamic").
        growth_tracker: clean steps in a row ("torch").
        exhausted: set to 1 by an overflow at the floor ("dynamic").
        scale_factor: growth of the scale, float64; "torch" calls it growth_factor.
        scale_window: clean steps between growths, int64; "torch" calls it growth_interval.
        min_scale: floor of the scale, float64.
        delayed_shift: full hysteresis, int64.
        backoff_factor: what an overflow multiplies the scale by ("torch"), float64.
        norm: written, never read; fp32.
        found_inf: written, never read; fp32.
        adam_w_mode: True for AdamW, False for Adam with L2 decay.
        bias_correction: False uses 1 for both corrections.
        rule: "static", "dynamic", "wrapper" or "torch".
        consecutive_hysteresis: see `reference.loss_scale.DynamicRule`.
        raise_error_at_min_scale: see `reference.loss_scale.DynamicRule`.
        compat: `unscale_with_updated_scale` and `growth_counts_this_step` are honoured here.

    Returns:
        New params, exp_avgs, exp_avg_sqs, copies, steps, scale, cur_iter, last_overflow_iter,
        cur_hysteresis, growth_tracker, exhausted, norm, found_inf. norm is the norm of the unscaled
        gradients: the fp32 norm of what is stored, divided by scale in float64, rounded to fp32.
        State that belongs to another rule keeps its bits. Nothing is mutated.

    Raises:
        ValueError: the rule is unknown.
    """
    before = ScaleState(
        scale=scale,
        cur_iter=cur_iter,
        last_overflow_iter=last_overflow_iter,
        cur_hysteresis=cur_hysteresis,
        growth_tracker=growth_tracker,
        exhausted=exhausted,
    )
    scale_rule = ScaleRule(
        name=rule,
        scale_factor=scale_factor,
        scale_window=scale_window,
        min_scale=min_scale,
        delayed_shift=delayed_shift,
        backoff_factor=backoff_factor,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
        growth_test=growth_test(compat),
    )
    del norm, found_inf
    new_found_inf = any_nonfinite(grads)
    scaled_norm = l2_norm(grads)
    after = advance(before, scale_rule, new_found_inf)
    applied = state_to_unscale_with(compat, before, after).scale
    (factor,) = clip_factor(norm=scaled_norm, scale=applied, max_norm=max_norm, factor=scaled_norm)
    step = adamw_step if adam_w_mode else adam_step
    lists = step(
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
        factor=factor,
        found_inf=new_found_inf,
        bias_correction=bias_correction,
    )
    new_norm = fp32(fp64(scaled_norm) / applied)
    return (*lists, *after.in_order(), new_norm, new_found_inf)
