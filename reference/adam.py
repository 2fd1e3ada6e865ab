"""Adam and AdamW with bias correction, one step.

Equations (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2), with the gradient
multiplied by a factor first (1/scale, or less when the norm is clipped):

    g = grad * factor
    g = g + wd p                                  (adam_step: L2)
    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g g
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    u = u + wd p                                  (adamw_step: decoupled)
    p = p - lr u
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.reference.arithmetic import bias_correction_of, fp32, one_minus, sqrt_rn
from twinstep.reference.parameters import Lists, for_each_parameter


@dataclass(frozen=True, kw_only=True)
class AdamScalars:
    """Scalars of one step of one parameter, each rounded once to fp32, shape ().

    Attributes:
        lr: learning rate.
        b1: decay of the first moment; `c1` is 1 - b1, formed in float64.
        b2: decay of the second moment; `c2` is 1 - b2, formed in float64.
        k1: 1 - b1^t, or 1 without bias correction.
        k2: 1 - b2^t, or 1 without bias correction.
        eps: added outside the square root.
        wd: weight decay.
        factor: what the stored gradient is multiplied by.
    """

    lr: Tensor
    b1: Tensor
    b2: Tensor
    c1: Tensor
    c2: Tensor
    k1: Tensor
    k2: Tensor
    eps: Tensor
    wd: Tensor
    factor: Tensor


def adam_scalars(
    t: int,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    bias_correction: bool,
) -> AdamScalars:
    """Scalars of step number t, counted from 1; arguments as those of `adam_step`."""
    one = torch.ones_like(fp32(beta1))
    return AdamScalars(
        lr=fp32(lr),
        b1=fp32(beta1),
        b2=fp32(beta2),
        c1=one_minus(beta1),
        c2=one_minus(beta2),
        k1=bias_correction_of(beta1, t) if bias_correction else one,
        k2=bias_correction_of(beta2, t) if bias_correction else one,
        eps=fp32(eps),
        wd=fp32(weight_decay),
        factor=factor,
    )


def adam_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamScalars
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of one tensor with L2 weight decay; all fp32; returns new p, m, v."""
    g = g * s.factor
    g = g + s.wd * p
    m = s.b1 * m + s.c1 * g
    v = s.b2 * v + (s.c2 * g) * g
    u = (m / s.k1) / (sqrt_rn(v / s.k2) + s.eps)
    p = p - s.lr * u
    return p, m, v


def adamw_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamScalars
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of one tensor with decoupled weight decay; all fp32; returns new p, m, v."""
    g = g * s.factor
    m = s.b1 * m + s.c1 * g
    v = s.b2 * v + (s.c2 * g) * g
    u = (m / s.k1) / (sqrt_rn(v / s.k2) + s.eps)
    u = u + s.wd * p
    p = p - s.lr * u
    return p, m, v


def adam_step(
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
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> Lists:
    """Adam with L2 weight decay: the decay enters the gradient, and so both moments.

    Args:
        params: master weights (fp32), or fp16/bf16 weights without masters; any shapes.
        grads: fp32, fp16 or bf16, one per parameter.
        exp_avgs: first moments, fp32; a narrower dtype is read to fp32 and rounded once.
        exp_avg_sqs: second moments, likewise.
        copies: low-precision model weights, one per parameter, or an empty list.
        steps: completed steps of each parameter, int64, shape ().
        lr: learning rate, float64, shape ().
        beta1: decay of the first moment, float64, shape ().
        beta2: decay of the second moment, float64, shape ().
        eps: added outside the square root, float64, shape ().
        weight_decay: L2 coefficient, applied whatever its sign, float64, shape ().
        factor: multiplies every gradient (1/scale or less), fp32, shape ().
        found_inf: not 0 skips the step: every output has the bits of its input.
        bias_correction: False uses 1 for both corrections.

    Returns:
        New params, exp_avgs, exp_avg_sqs, copies, steps. Nothing is mutated. Each parameter and
        each copy is rounded once, from the same fp32 result.
    """

    def update(t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s = adam_scalars(t, lr, beta1, beta2, eps, weight_decay, factor, bias_correction)
        return adam_update(p, g, m, v, s)

    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    return for_each_parameter("adam_step", update, params, grads, moments, copies, steps, found_inf)


def adamw_step(
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
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> Lists:
    """AdamW: weight decay acts on the weights alone and never enters a moment.

    Arguments, dtypes and result are those of `adam_step`.
    """

    def update(t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s = adam_scalars(t, lr, beta1, beta2, eps, weight_decay, factor, bias_correction)
        return adamw_update(p, g, m, v, s)

    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    return for_each_parameter(
        "adamw_step", update, params, grads, moments, copies, steps, found_inf
    )
