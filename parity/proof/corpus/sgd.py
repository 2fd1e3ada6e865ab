"""A correct SGD step in plain torch, with a seam at every formula.

g = fp32(grad) * factor;  g = g + wd * p
b = g at the first step, afterwards momentum * b + (1 - dampening) * g
d = g + momentum * b with Nesterov, otherwise b;  without momentums d = g
p = p - lr * d
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32, scalar
from twinstep.parity.proof.corpus.calls import SgdCall, skipped


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The constants of a step, fp32, 0-dim."""

    lr: Tensor
    mu: Tensor
    damp: Tensor
    wd: Tensor


def scalars(call: SgdCall) -> Scalars:
    """lr, momentum, 1 - dampening and weight decay, rounded once."""
    return Scalars(
        lr=fp32(call.lr),
        mu=fp32(call.momentum),
        damp=scalar(1.0 - float(call.dampening)),
        wd=fp32(call.weight_decay),
    )


def decayed(s: Scalars, g: Tensor, p: Tensor) -> Tensor:
    """G + wd * p."""
    return g + s.wd * p


def buffer(s: Scalars, b: Tensor, g: Tensor, t: int) -> Tensor:
    """The momentum buffer: g itself at t = 1, then momentum * b + (1 - dampening) * g."""
    return g if t == 1 else s.mu * b + s.damp * g


def direction(s: Scalars, b: Tensor, g: Tensor, nesterov: bool) -> Tensor:
    """Direction of the step: the buffer, or with Nesterov g + momentum * buffer."""
    return g + s.mu * b if nesterov else b


def apply(s: Scalars, p: Tensor, d: Tensor) -> Tensor:
    """P - lr * d."""
    return p - s.lr * d


@dataclass(frozen=True, kw_only=True)
class SgdPieces:
    """The formulas of one step; the defaults are SGD as it should be."""

    decayed: Callable[[Scalars, Tensor, Tensor], Tensor] = decayed
    buffer: Callable[[Scalars, Tensor, Tensor, int], Tensor] = buffer
    direction: Callable[[Scalars, Tensor, Tensor, bool], Tensor] = direction
    apply: Callable[[Scalars, Tensor, Tensor], Tensor] = apply
    counts: bool = True


SGD = SgdPieces()


def step(call: SgdCall, f: SgdPieces = SGD) -> None:
    """The step over every tensor of the call, unless it is skipped."""
    if skipped(call):
        return
    s = scalars(call)
    for i, param in enumerate(call.params):
        p = fp32(param)
        g = f.decayed(s, fp32(call.grads[i]) * call.factor, p)
        d = g
        if call.momentums:
            b = f.buffer(s, call.momentums[i].clone(), g, int(call.steps[i]) + 1)
            d = f.direction(s, b, g, call.nesterov)
            call.momentums[i].copy_(b)
        p = f.apply(s, p, d)
        param.copy_(p)
        if call.copies:
            call.copies[i].copy_(p)
        if f.counts:
            call.steps[i].add_(1)
