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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.reference.arithmetic import bias_correction_of, fp32, one_minus, sqrt_rn
from twinstep.reference.lists import check_lengths, check_steps, or_absent, unchanged

AdamResult = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


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


def moments(g: Tensor, m: Tensor, v: Tensor, s: AdamScalars) -> tuple[Tensor, Tensor]:
    """Decay both moments towards g and its square; all fp32, same shape."""
    m = s.b1 * m + s.c1 * g
    v = s.b2 * v + (s.c2 * g) * g
    return m, v


def direction(m: Tensor, v: Tensor, s: AdamScalars) -> Tensor:
    """Bias-corrected first moment over the root of the second; eps outside the root."""
    return (m / s.k1) / (sqrt_rn(v / s.k2) + s.eps)


def adam_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamScalars
) -> tuple[Tensor, Tensor, Tensor]:
    """One step on one tensor with L2 weight decay; all fp32; returns new p, m, v."""
    g = g * s.factor
    g = g + s.wd * p
    m, v = moments(g, m, v, s)
    u = direction(m, v, s)
    p = p - s.lr * u
    return p, m, v


def adamw_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: AdamScalars
) -> tuple[Tensor, Tensor, Tensor]:
    """One step on one tensor with decoupled weight decay; all fp32; returns new p, m, v."""
    g = g * s.factor
    m, v = moments(g, m, v, s)
    u = direction(m, v, s)
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
) -> AdamResult:
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
    scalars = _Scalars(lr, beta1, beta2, eps, weight_decay, factor, bias_correction)
    lists = (params, grads, exp_avgs, exp_avg_sqs, copies, steps)
    return _over_lists("adam_step", adam_update, scalars, found_inf, *lists)


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
) -> AdamResult:
    """AdamW: weight decay acts on the weights alone and never enters a moment.

    Arguments, dtypes and result are those of `adam_step`.
    """
    scalars = _Scalars(lr, beta1, beta2, eps, weight_decay, factor, bias_correction)
    lists = (params, grads, exp_avgs, exp_avg_sqs, copies, steps)
    return _over_lists("adamw_step", adamw_update, scalars, found_inf, *lists)


@dataclass(frozen=True)
class _Scalars:
    """Controls of a call, float64; `at(t)` gives a parameter's scalars, rounded once."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    factor: Tensor
    bias_correction: bool

    def at(self, t: int) -> AdamScalars:
        one = torch.ones_like(fp32(self.beta1))
        return AdamScalars(
            lr=fp32(self.lr),
            b1=fp32(self.beta1),
            b2=fp32(self.beta2),
            c1=one_minus(self.beta1),
            c2=one_minus(self.beta2),
            k1=bias_correction_of(self.beta1, t) if self.bias_correction else one,
            k2=bias_correction_of(self.beta2, t) if self.bias_correction else one,
            eps=fp32(self.eps),
            wd=fp32(self.weight_decay),
            factor=self.factor,
        )


Update = Callable[[Tensor, Tensor, Tensor, Tensor, AdamScalars], tuple[Tensor, Tensor, Tensor]]


def _over_lists(
    where: str,
    update: Update,
    scalars: _Scalars,
    found_inf: Tensor,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> AdamResult:
    """Apply the update to every parameter, or copy everything when the step is skipped."""
    required = {"params": params, "grads": grads}
    required |= {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    check_lengths(where, required, {"copies": copies})
    check_steps(where, steps, params)
    if found_inf.item() != 0:
        written = (params, exp_avgs, exp_avg_sqs, copies, steps)
        new_p, new_m, new_v, new_copies, new_steps = map(unchanged, written)
        return new_p, new_m, new_v, new_copies, new_steps
    new_p, new_m, new_v, new_copies, new_steps = [], [], [], [], []
    absent_or_copies = or_absent(copies, len(params))
    rows = zip(params, grads, exp_avgs, exp_avg_sqs, absent_or_copies, steps, strict=True)
    for param, grad, exp_avg, exp_avg_sq, copy, step in rows:
        s = scalars.at(int(step.item()) + 1)
        p, m, v = update(fp32(param), fp32(grad), fp32(exp_avg), fp32(exp_avg_sq), s)
        new_p.append(p.to(param.dtype))
        new_m.append(m.to(exp_avg.dtype))
        new_v.append(v.to(exp_avg_sq.dtype))
        new_steps.append(step + 1)
        if copy is not None:
            new_copies.append(p.to(copy.dtype))
    return new_p, new_m, new_v, new_copies, new_steps
