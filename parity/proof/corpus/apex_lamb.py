"""A correct step of apex's LAMB in plain torch, with a seam at every formula that is replaced.

c = n / max_norm if n > max_norm > 0, else 1;  n = norm * factor;  h = (g * factor) / c
u = (m / k1) / (sqrt(v / k2) + eps) + wd * p         (or h = h + wd * p before)
rho = |p| / |u|, 1 where a norm is 0, and without decay unless use_nvlamb
p = p - (lr * rho) * u
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32, power, scalar, sqrt_rn
from twinstep.parity.proof.corpus.calls import ApexLambCall, skipped
from twinstep.parity.proof.corpus.lamb import length


def divisor(call: ApexLambCall) -> Tensor:
    """Divisor of all gradients, fp32."""
    n, largest = call.norm * call.factor, fp32(call.max_norm)
    return n / largest if bool((largest > 0) & (n > largest)) else torch.ones(())


def gradient(call: ApexLambCall, g: Tensor, p: Tensor) -> Tensor:
    """The gradient that enters both moments."""
    return decayed(call, (fp32(g) * call.factor) / divisor(call), p)


def decayed(call: ApexLambCall, h: Tensor, p: Tensor) -> Tensor:
    """A gradient with the decay in it, where that is its place."""
    return h if call.adam_w_mode else h + fp32(call.weight_decay) * p


def corrections(call: ApexLambCall, t: int) -> tuple[Tensor, Tensor]:
    """1 - beta1**t and 1 - beta2**t, or 1."""
    if not call.bias_correction:
        return torch.ones(()), torch.ones(())
    return scalar(1.0 - power(float(call.beta1), t)), scalar(1.0 - power(float(call.beta2), t))


def ratio(call: ApexLambCall, p: Tensor, u: Tensor) -> Tensor:
    """The trust ratio of one tensor, fp32."""
    w, n = length(p), length(u)
    adapts = call.use_nvlamb or float(fp32(call.weight_decay)) != 0.0
    return w / n if adapts and float(w) != 0.0 and float(n) != 0.0 else torch.ones(())


@dataclass(frozen=True, kw_only=True)
class ApexPieces:
    """The formulas of one step; the defaults are right."""

    gradient: Callable[[ApexLambCall, Tensor, Tensor], Tensor] = gradient
    corrections: Callable[[ApexLambCall, int], tuple[Tensor, Tensor]] = corrections
    ratio: Callable[[ApexLambCall, Tensor, Tensor], Tensor] = ratio


APEX = ApexPieces()


def step(call: ApexLambCall, f: ApexPieces = APEX) -> None:
    """The step over every tensor of the call, unless it is skipped."""
    if not skipped(call):
        for i in range(len(call.params)):
            update(call, i, f)


def update(call: ApexLambCall, i: int, f: ApexPieces) -> None:
    """The step of tensor i, written in place."""
    beta1, beta2 = float(call.beta1), float(call.beta2)
    p = fp32(call.params[i])
    h = f.gradient(call, call.grads[i], p)
    beta3 = scalar(1.0 - beta1) if call.grad_averaging else torch.ones(())
    m = scalar(beta1) * fp32(call.exp_avgs[i]) + beta3 * h
    v = scalar(beta2) * fp32(call.exp_avg_sqs[i]) + (scalar(1.0 - beta2) * h) * h
    k1, k2 = f.corrections(call, int(call.steps[i]) + 1)
    u = (m / k1) / (sqrt_rn(v / k2) + fp32(call.eps))
    if call.adam_w_mode:
        u = u + fp32(call.weight_decay) * p
    p = p - (fp32(call.lr) * f.ratio(call, p, u)) * u
    call.exp_avgs[i].copy_(m)
    call.exp_avg_sqs[i].copy_(v)
    call.params[i].copy_(p)
    if call.copies:
        call.copies[i].copy_(p)
    call.steps[i].add_(1)
