"""LAMB as apex gives it: Adam's corrected direction, clipped by the norm of all gradients.

Equations (You et al. 2020, algorithm 2), in the form of apex's `FusedLAMB`: its first stage forms
u, its second moves the weights.

    n   = norm * factor                    the norm of the gradients of all parameters
    c   = n / max_norm if n > max_norm > 0, else 1
    h   = (grad * factor) / c
    h   = h + wd p                         (without adam_w_mode: L2)
    m   = b1 m + b3 h                      b3 = 1 - b1 with grad_averaging, else 1
    v   = b2 v + (1 - b2) h h
    u   = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    u   = u + wd p                         (with adam_w_mode)
    rho = |p| / |u|;  1 if either norm is 0, or if wd = 0 without use_nvlamb
    p   = p - (lr rho) u

|p| and |u| are of one whole tensor: joining or splitting tensors changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.reference.adam import AdamScalars, adam_scalars
from twinstep.reference.arithmetic import fp32, sqrt_rn
from twinstep.reference.norm import l2_norm
from twinstep.reference.parameters import Lists, for_each_parameter


@dataclass(frozen=True, kw_only=True)
class ApexOptions:
    """Choices that apex's constructor takes.

    Attributes:
        bias_correction: False uses 1 for both corrections.
        adam_w_mode: True adds the decay to the direction, False to the gradient.
        grad_averaging: False adds the whole gradient to the first moment, not 1 - b1 of it.
        use_nvlamb: True takes the trust ratio of every parameter, without a decay too.
    """

    bias_correction: bool
    adam_w_mode: bool
    grad_averaging: bool
    use_nvlamb: bool


def clip_divisor(norm: Tensor, max_norm: Tensor) -> Tensor:
    """Divisor of all gradients: norm / max_norm if norm > max_norm > 0, else 1.

    Args:
        norm: of all gradients, fp32, shape ().
        max_norm: float64, shape (); 0 or below does not clip.

    Returns:
        fp32, shape (): max_norm is rounded first. A NaN norm does not clip, an infinite one gives
        infinity.
    """
    largest = fp32(max_norm)
    return torch.where((largest > 0) & (norm > largest), norm / largest, torch.ones_like(norm))


def apex_trust_ratio(p: Tensor, u: Tensor, wd: Tensor, *, use_nvlamb: bool) -> Tensor:
    """Norm of the weights over norm of the direction, unbounded; fp32, shape ().

    Specials: 1 where a norm is 0, and without decay unless `use_nvlamb`; NaN gives NaN.
    """
    w = l2_norm([p])
    n = l2_norm([u])
    adapts = (w != 0) & (n != 0) & ((wd != 0) | use_nvlamb)
    return torch.where(adapts, w / n, torch.ones_like(w))


def apex_lamb_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    s: AdamScalars,
    divisor: Tensor,
    options: ApexOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step on one tensor; all fp32; returns new p, m and v."""
    h = (g * s.factor) / divisor
    if not options.adam_w_mode:
        h = h + s.wd * p
    b3 = s.c1 if options.grad_averaging else torch.ones_like(s.c1)
    m = s.b1 * m + b3 * h
    v = s.b2 * v + (s.c2 * h) * h
    u = (m / s.k1) / (sqrt_rn(v / s.k2) + s.eps)
    if options.adam_w_mode:
        u = u + s.wd * p
    rho = apex_trust_ratio(p, u, s.wd, use_nvlamb=options.use_nvlamb)
    p = p - (s.lr * rho) * u
    return p, m, v


def apex_lamb_step(
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
    norm: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
    adam_w_mode: bool,
    grad_averaging: bool,
    use_nvlamb: bool,
) -> Lists:
    """One step of apex's LAMB on every parameter.

    Args:
        params: master weights (fp32), or fp16/bf16 weights without masters; any shapes.
        grads: fp32, fp16 or bf16, one per parameter.
        exp_avgs: first moments, fp32; a narrower dtype is read to fp32 and rounded once.
        exp_avg_sqs: second moments, likewise.
        copies: low-precision model weights, one per parameter, or an empty list.
        steps: completed steps of each parameter, int64, shape ().
        lr: learning rate, float64, shape (), like the controls up to `max_norm`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added outside the square root.
        weight_decay: of the direction or of the gradient, applied whatever its sign.
        max_norm: largest norm of all gradients; 0 or below does not clip.
        norm: of all gradients as they are stored, of other calls' too; fp32, shape ().
        factor: multiplies every gradient and their norm (1/scale), fp32, shape ().
        found_inf: not 0 skips the step: every output has the bits of its input.
        bias_correction: as the other three in `ApexOptions`.
        adam_w_mode: True adds the decay to the direction, False to the gradient.
        grad_averaging: False adds the whole gradient to the first moment.
        use_nvlamb: True takes the trust ratio without a decay too.

    Returns:
        New params, exp_avgs, exp_avg_sqs, copies, steps. Nothing is mutated. Each parameter and
        each copy is rounded once, from the same fp32 result. An empty tensor stays empty, and its
        step counts.
    """
    divisor = clip_divisor(norm * factor, max_norm)
    options = ApexOptions(
        bias_correction=bias_correction,
        adam_w_mode=adam_w_mode,
        grad_averaging=grad_averaging,
        use_nvlamb=use_nvlamb,
    )

    def update(t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s = adam_scalars(t, lr, beta1, beta2, eps, weight_decay, factor, bias_correction)
        return apex_lamb_update(p, g, m, v, s, divisor, options)

    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    where = "apex_lamb_step"
    return for_each_parameter(where, update, params, grads, moments, copies, steps, found_inf)
