"""A correct Adam and AdamW step in plain torch, with a seam at every formula.

    g = fp32(grad) * factor          L2: g = g + wd * p
    m = b1 * m + c1 * g              v = b2 * v + (c2 * g) * g
    u = (m / k1) / (sqrt(v / k2) + eps)   decoupled: u = u + wd * p
    p = p - lr * u

Each line is one field of `AdamPieces`; a wrong kernel replaces one of them. Scalars are formed in
float64 and rounded once to fp32; t is the stored step count plus one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32, power, scalar, sqrt_rn
from twinstep.parity.proof.corpus.calls import AdamCall, Tensors, skipped


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The constants of one tensor's step, fp32, 0-dim."""

    b1: Tensor
    b2: Tensor
    c1: Tensor
    c2: Tensor
    k1: Tensor
    k2: Tensor
    lr: Tensor
    eps: Tensor
    wd: Tensor


def scalars(call: AdamCall, t: int) -> Scalars:
    """b, c = 1 - b and k = 1 - b**t in float64, rounded once."""
    beta1, beta2 = float(call.beta1), float(call.beta2)
    return Scalars(
        b1=scalar(beta1),
        b2=scalar(beta2),
        c1=scalar(1.0 - beta1),
        c2=scalar(1.0 - beta2),
        k1=scalar(1.0 - power(beta1, t) if call.bias_correction else 1.0),
        k2=scalar(1.0 - power(beta2, t) if call.bias_correction else 1.0),
        lr=fp32(call.lr),
        eps=fp32(call.eps),
        wd=fp32(call.weight_decay),
    )


def next_count(call: AdamCall, i: int) -> int:
    """The step number of tensor i: what is stored, plus one."""
    return int(call.steps[i]) + 1


def unscaled(grad: Tensor, factor: Tensor) -> Tensor:
    """The gradient in fp32, times the factor."""
    return fp32(grad) * factor


def first_moment(s: Scalars, m: Tensor, g: Tensor) -> Tensor:
    """b1 * m + c1 * g."""
    return s.b1 * m + s.c1 * g


def second_moment(s: Scalars, v: Tensor, g: Tensor) -> Tensor:
    """b2 * v + (c2 * g) * g."""
    return s.b2 * v + (s.c2 * g) * g


def denominator(s: Scalars, v: Tensor) -> Tensor:
    """sqrt(v / k2) + eps."""
    return sqrt_rn(v / s.k2) + s.eps


def direction(s: Scalars, m: Tensor, denom: Tensor) -> Tensor:
    """(m / k1) / denominator."""
    return (m / s.k1) / denom


def decay(s: Scalars, u: Tensor, p: Tensor) -> Tensor:
    """U + wd * p: decoupled weight decay."""
    return u + s.wd * p


def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
    """P - lr * u."""
    return p - s.lr * u


def as_is(value: Tensor) -> Tensor:
    """Nothing on the way to storage but the one rounding of the store."""
    return value


@dataclass(frozen=True, kw_only=True)
class AdamPieces:
    """The formulas of one step; the defaults are AdamW as it should be."""

    decoupled: bool = True
    scalars: Callable[[AdamCall, int], Scalars] = scalars
    count: Callable[[AdamCall, int], int] = next_count
    gradient: Callable[[Tensor, Tensor], Tensor] = unscaled
    first: Callable[[Scalars, Tensor, Tensor], Tensor] = first_moment
    second: Callable[[Scalars, Tensor, Tensor], Tensor] = second_moment
    denominator: Callable[[Scalars, Tensor], Tensor] = denominator
    direction: Callable[[Scalars, Tensor, Tensor], Tensor] = direction
    decay: Callable[[Scalars, Tensor, Tensor], Tensor] = decay
    apply: Callable[[Scalars, Tensor, Tensor], Tensor] = apply
    moment: Callable[[Tensor], Tensor] = as_is
    copy: Callable[[Tensor], Tensor] = as_is


ADAMW = AdamPieces()
ADAM = AdamPieces(decoupled=False)


def step(call: AdamCall, pieces: AdamPieces = ADAMW) -> None:
    """The step over every tensor of the call, unless it is skipped."""
    if not skipped(call):
        for i in range(len(call.params)):
            update(call, i, pieces)


def update(call: AdamCall, i: int, f: AdamPieces) -> None:
    """The step of tensor i, written in place."""
    s = f.scalars(call, f.count(call, i))
    p = fp32(call.params[i])
    g = f.gradient(call.grads[i], call.factor)
    if not f.decoupled:
        g = g + s.wd * p
    m = f.first(s, call.exp_avgs[i], g)
    v = f.second(s, call.exp_avg_sqs[i], g)
    u = f.direction(s, m, f.denominator(s, v))
    if f.decoupled:
        u = f.decay(s, u, p)
    p = f.apply(s, p, u)
    call.exp_avgs[i].copy_(f.moment(m))
    call.exp_avg_sqs[i].copy_(f.moment(v))
    call.params[i].copy_(p)
    if call.copies:
        call.copies[i].copy_(f.copy(p))
    call.steps[i].add_(1)


def with_lists(call: AdamCall, change: Callable[[str, Tensors], Tensors]) -> AdamCall:
    """The call with every list argument replaced by `change(name, list)`."""
    return replace(
        call,
        params=change("params", call.params),
        grads=change("grads", call.grads),
        exp_avgs=change("exp_avgs", call.exp_avgs),
        exp_avg_sqs=change("exp_avg_sqs", call.exp_avg_sqs),
        copies=change("copies", call.copies),
        steps=change("steps", call.steps),
    )


def only(i: int) -> Callable[[str, Tensors], Tensors]:
    """A change of lists that keeps tensor i alone."""
    return lambda name, tensors: tensors[i : i + 1]


def windowed(call: AdamCall, window: Callable[[Tensor], slice]) -> AdamCall:
    """The call on a part of every tensor: `window(tensor)` of its elements, in storage order.

    The step counters stay whole, so whoever runs two windows advances them twice.
    """

    def part(name: str, tensors: Tensors) -> Tensors:
        return tensors if name == "steps" else [t.view(-1)[window(t)] for t in tensors]

    return with_lists(call, part)
