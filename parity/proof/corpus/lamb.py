"""A correct LAMB step in plain torch, with a seam at every formula that a wrong kernel replaces.

m = b1 * m + c1 * h              v = b2 * v + (c2 * h) * h
u = m / (sqrt(v) + eps) + wd * p         (or m / sqrt(v + eps))
rho = max(min(|p| / |u|, max_coeff), min_coeff), 1 where a norm is 0
p = p - (a * rho) * u,  a = lr * sqrt(1 - beta2**t) / (1 - beta1**t)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import (
    fp32,
    power,
    scalar,
    sqrt_rn,
    square_root,
    sum_of_squares,
)
from twinstep.parity.proof.corpus.calls import LambCall, skipped


def length(t: Tensor) -> Tensor:
    """The norm of one tensor: exact sum of squares, root in float64, one rounding to fp32."""
    return scalar(square_root(sum_of_squares([t])))


def ratio(call: LambCall, p: Tensor, u: Tensor) -> Tensor:
    """The trust ratio of one tensor, fp32."""
    w, n = length(p), length(u)
    if float(w) == 0.0 or float(n) == 0.0:
        return torch.ones(())
    return torch.maximum(torch.minimum(w / n, fp32(call.max_coeff)), fp32(call.min_coeff))


def step_size(call: LambCall, t: int) -> Tensor:
    """The step size: lr * sqrt(1 - beta2**t) / (1 - beta1**t), or lr; float64, rounded once."""
    lr, beta1, beta2 = float(call.lr), float(call.beta1), float(call.beta2)
    if not call.bias_correction:
        return scalar(lr)
    return scalar((lr * math.sqrt(1.0 - power(beta2, t))) / (1.0 - power(beta1, t)))


def direction(call: LambCall, m: Tensor, v: Tensor) -> Tensor:
    """The direction before the decay."""
    eps = fp32(call.eps)
    return m / (sqrt_rn(v + eps) if call.eps_inside_sqrt else sqrt_rn(v) + eps)


@dataclass(frozen=True, kw_only=True)
class LambPieces:
    """The formulas of one step; the defaults are right."""

    ratio: Callable[[LambCall, Tensor, Tensor], Tensor] = ratio
    step_size: Callable[[LambCall, int], Tensor] = step_size
    direction: Callable[[LambCall, Tensor, Tensor], Tensor] = direction


LAMB = LambPieces()


def step(call: LambCall, f: LambPieces = LAMB) -> None:
    """The step over every tensor of the call, unless it is skipped."""
    if not skipped(call):
        for i in range(len(call.params)):
            update(call, i, f)


def update(call: LambCall, i: int, f: LambPieces) -> None:
    """The step of tensor i, written in place."""
    beta1, beta2 = float(call.beta1), float(call.beta2)
    p = fp32(call.params[i])
    h = fp32(call.grads[i]) * call.factor
    m = scalar(beta1) * fp32(call.exp_avgs[i]) + scalar(1.0 - beta1) * h
    v = scalar(beta2) * fp32(call.exp_avg_sqs[i]) + (scalar(1.0 - beta2) * h) * h
    u = f.direction(call, m, v) + fp32(call.weight_decay) * p
    a = f.step_size(call, int(call.steps[i]) + 1) * f.ratio(call, p, u)
    p = p - a * u
    call.exp_avgs[i].copy_(m)
    call.exp_avg_sqs[i].copy_(v)
    call.params[i].copy_(p)
    if call.copies:
        call.copies[i].copy_(p)
    call.steps[i].add_(1)
