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
from dataclasses import dataclass

from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.arithmetic import float64, fp32, fp64
from twinstep.reference.clip import clip_factor
from twinstep.reference.loss_scale import ScaleState, Transition
from twinstep.reference.norm import l2_norm
from twinstep.reference.parameters import Lists
from twinstep.reference.unscale import any_nonfinite


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """Everything that a whole step makes.

    Attributes:
        lists: new params, exp_avgs, exp_avg_sqs, copies, steps.
        scaling: the loss-scale state for the next step.
        norm: of the unscaled gradients: the fp32 norm of what is stored, divided by the scale in
            float64, rounded to fp32.
        found_inf: 1.0 if any gradient is non-finite, else 0.0; fp32.
    """

    lists: Lists
    scaling: ScaleState
    norm: Tensor
    found_inf: Tensor


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
    scaling: ScaleState,
    rule: Transition,
    adam_w_mode: bool,
    bias_correction: bool,
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
        scaling: the loss scale that the gradients were made with, and its counters.
        rule: (state, found_inf) -> state, such as `DynamicRule().after`.
        adam_w_mode: True for AdamW, False for Adam with L2 decay.
        bias_correction: False uses 1 for both corrections.
        compat: `unscale_with_updated_scale` is honoured here.

    Returns:
        The new tensors and the new state. Nothing is mutated.
    """
    found_inf = any_nonfinite(grads)
    scaled_norm = l2_norm(grads)
    after = rule(scaling, found_inf.item() != 0)
    scale = float64(after.scale if compat.unscale_with_updated_scale else scaling.scale)
    factor = clip_factor(norm=scaled_norm, scale=scale, max_norm=max_norm)
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
        found_inf=found_inf,
        bias_correction=bias_correction,
    )
    norm = fp32(fp64(scaled_norm) / scale)
    return MixedResult(lists=lists, scaling=after, norm=norm, found_inf=found_inf)
