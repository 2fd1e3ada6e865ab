"""LAMB: Adam's moments, and a step whose length follows the norm of each tensor.

Equations (You et al. 2020, algorithm 2), in the form that DeepSpeed's `FusedLamb` gives them: no
bias correction inside the direction, all of it in the step size, and a bounded trust ratio.

    h   = grad * factor
    m   = b1 m + (1 - b1) h
    v   = b2 v + (1 - b2) h h
    u   = m / (sqrt(v) + eps)              or  m / sqrt(v + eps)
    u   = u + wd p
    rho = |p| / |u|, kept in [min_coeff, max_coeff];  1 if either norm is 0
    a   = lr sqrt(1 - b2^t) / (1 - b1^t)   or  lr without bias correction
    p   = p - (a rho) u

Both norms are of one whole tensor: joining or splitting tensors changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.reference.arithmetic import fp32, fp64, one_minus, power, sqrt_rn
from twinstep.reference.norm import l2_norm
from twinstep.reference.parameters import Lists, for_each_parameter


@dataclass(frozen=True, kw_only=True)
class LambScalars:
    """Scalars of one step of one parameter, each rounded once to fp32, shape ().

    Attributes:
        step_size: a, formed in float64.
        b1: decay of the first moment; `c1` is 1 - b1, formed in float64.
        b2: decay of the second moment; `c2` is 1 - b2, formed in float64.
        eps: added outside the square root, or inside it.
        wd: weight decay.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        factor: what the stored gradient is multiplied by.
    """

    step_size: Tensor
    b1: Tensor
    b2: Tensor
    c1: Tensor
    c2: Tensor
    eps: Tensor
    wd: Tensor
    max_coeff: Tensor
    min_coeff: Tensor
    factor: Tensor


def step_size_of(lr: Tensor, beta1: Tensor, beta2: Tensor, t: int) -> Tensor:
    """(lr sqrt(1 - beta2^t)) / (1 - beta1^t), in float64, rounded once to fp32.

    Args:
        lr: learning rate, float64, shape ().
        beta1: decay of the first moment, float64, shape ().
        beta2: decay of the second moment, float64, shape ().
        t: number of this step, counted from 1.
    """
    # math.sqrt rounds correctly; torch does not promise it.
    root = math.sqrt((1.0 - power(beta2, t)).item())
    return fp32((fp64(lr) * root) / (1.0 - power(beta1, t)))


def lamb_scalars(
    t: int,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    max_coeff: Tensor,
    min_coeff: Tensor,
    factor: Tensor,
    bias_correction: bool,
) -> LambScalars:
    """Scalars of step number t, counted from 1; arguments as those of `lamb_step`."""
    return LambScalars(
        step_size=step_size_of(lr, beta1, beta2, t) if bias_correction else fp32(lr),
        b1=fp32(beta1),
        b2=fp32(beta2),
        c1=one_minus(beta1),
        c2=one_minus(beta2),
        eps=fp32(eps),
        wd=fp32(weight_decay),
        max_coeff=fp32(max_coeff),
        min_coeff=fp32(min_coeff),
        factor=factor,
    )


def trust_ratio(p: Tensor, u: Tensor, s: LambScalars) -> Tensor:
    """Norm of the weights over norm of the direction, bounded; fp32, shape ().

    Each norm is that of `reference.norm.l2_norm`: exact sum, one rounding to float64, root, one
    rounding to fp32.

    Specials: a norm of 0 gives exactly 1, whatever the bounds are; NaN gives NaN.
    """
    w = l2_norm([p])
    n = l2_norm([u])
    rho = torch.maximum(torch.minimum(w / n, s.max_coeff), s.min_coeff)
    return torch.where((w != 0) & (n != 0), rho, torch.ones_like(rho))


def lamb_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: LambScalars, *, eps_inside_sqrt: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step on one tensor; all fp32; returns new p, m, v and the trust ratio."""
    h = g * s.factor
    m = s.b1 * m + s.c1 * h
    v = s.b2 * v + (s.c2 * h) * h
    d = sqrt_rn(v + s.eps) if eps_inside_sqrt else sqrt_rn(v) + s.eps
    u = m / d
    u = u + s.wd * p
    rho = trust_ratio(p, u, s)
    p = p - (s.step_size * rho) * u
    return p, m, v, rho


def lamb_step(
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
    max_coeff: Tensor,
    min_coeff: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
    eps_inside_sqrt: bool,
) -> Lists:
    """One step of LAMB on every parameter.

    Args:
        params: master weights (fp32), or fp16/bf16 weights without masters; any shapes.
        grads: fp32, fp16 or bf16, one per parameter.
        exp_avgs: first moments, fp32; a narrower dtype is read to fp32 and rounded once.
        exp_avg_sqs: second moments, likewise.
        copies: low-precision model weights, one per parameter, or an empty list.
        steps: completed steps of each parameter, int64, shape ().
        lr: learning rate, float64, shape (), like the controls up to `min_coeff`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root, or under it.
        weight_decay: of the direction, applied whatever its sign.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        factor: multiplies every gradient (1/scale or less), fp32, shape ().
        found_inf: not 0 skips the step: every output has the bits of its input.
        bias_correction: False uses lr itself as the step size.
        eps_inside_sqrt: True divides by sqrt(v + eps), False by sqrt(v) + eps.

    Returns:
        New params, exp_avgs, exp_avg_sqs, copies, steps. Nothing is mutated. Each parameter and
        each copy is rounded once, from the same fp32 result. An empty tensor stays empty, and its
        step counts.
    """

    def update(t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        step = (t, lr, beta1, beta2, eps, weight_decay, max_coeff, min_coeff, factor)
        s = lamb_scalars(*step, bias_correction)
        p, m, v, _ = lamb_update(p, g, m, v, s, eps_inside_sqrt=eps_inside_sqrt)
        return p, m, v

    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    return for_each_parameter("lamb_step", update, params, grads, moments, copies, steps, found_inf)
