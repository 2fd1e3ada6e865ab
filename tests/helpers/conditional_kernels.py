"""AdamW in torch, wrong where a condition of values or hyper-parameters holds, or in another order.

`WRONG` replaces one quantity of the step; `REORDERED` computes the update of one tensor in a way
that is equal over the real numbers. They were written after the prover; one of them has changed it
since: the primes of the reals are such that `sqrt(4 v)` is `2 sqrt(v)`.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

Now = SimpleNamespace
"""Quantities of the step so far, by name."""


def step(
    wrong: tuple[str, Callable[[Now, Tensor], Tensor]] | None = None,
    update: Callable[[Now], tuple[Tensor, Tensor, Tensor]] | None = None,
    skips: Callable[[Now], bool] | None = None,
) -> Callable[..., None]:
    """A kernel of the operation `adamw_step`, with something else in one place."""

    def adamw(
        params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor], copies: list[Tensor], steps: list[Tensor], *,
        lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor, weight_decay: Tensor,
        factor: Tensor, found_inf: Tensor, bias_correction: bool,
    ) -> None:  # fmt: skip
        del copies, bias_correction
        now = Now(found_inf=found_inf, given=lr, factor=factor)
        if (skips or _found)(now):
            return

        def put(name: str, value: Tensor) -> None:
            setattr(now, name, value)
            if wrong is not None and wrong[0] == name:
                setattr(now, name, wrong[1](now, value))

        for p, grad, m, v, count in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
            now.p, now.m, now.v, now.grad = p, m, v, grad.float()
            put("f", factor)
            put("b1", beta1.float())
            put("b2", beta2.float())
            put("c1", (1 - beta1).float())
            put("c2", (1 - beta2).float())
            put("lr", lr.float())
            put("e", eps.float())
            put("wd", weight_decay.float())
            put("g", now.grad * now.f)
            if update is not None:
                for tensor, value in zip((p, m, v), update(now), strict=True):
                    tensor.copy_(value)
            else:
                put("m", now.b1 * m + now.c1 * now.g)
                put("v", now.b2 * v + (now.c2 * now.g) * now.g)
                put("u", now.m / (root(now.v) + now.e))
                put("d", now.wd * p)
                put("new", p - now.lr * (now.u + now.d))
                p.copy_(now.new)
                m.copy_(now.m)
                v.copy_(now.v)
            count += 1

    return adamw


def _found(now: Now) -> bool:
    return bool(now.found_inf.item())


def root(v: Tensor) -> Tensor:
    return v.double().sqrt().float()


WRONG: dict[str, Callable[..., None]] = {
    "factor of exactly one": step(("g", lambda s, g: torch.where(s.f == 1.0, g * 1.0000001, g))),
    "factor above 1000": step(("f", lambda s, f: torch.where(f > 1000.0, f * 0.5, f))),
    "factor below zero": step(("f", lambda s, f: f.abs())),
    "rate above ten": step(("lr", lambda s, lr: torch.where(lr > 10.0, lr * 2, lr))),
    "rate of 0.001": step(("lr", lambda s, lr: torch.where(lr == 0.001, lr * 1.0000002, lr))),
    "small beta1": step(("b1", lambda s, b: torch.where(b < 0.5, b * 0.5, b))),
    "beta2 of 0.999": step(("c2", lambda s, c: torch.where(s.b2 == 0.999, c * 1.001, c))),
    "equal betas": step(("c2", lambda s, c: torch.where(s.b1 == s.b2, c * 2, c))),
    "epsilon of zero": step(("e", lambda s, e: torch.where(e == 0, e + 1e-8, e))),
    "decay above one": step(("wd", lambda s, wd: torch.where(wd > 1.0, wd * 0 + 1.0, wd))),
    "large gradients clipped": step(("g", lambda s, g: torch.where(g > 1e4, g * 0 + 1e4, g))),
    "one gradient": step(("g", lambda s, g: torch.where(g == 0.33325195, g * 0.5, g))),
    "NaN is zero": step(("g", lambda s, g: torch.where(g == g, g, 0.0))),
    "subnormal gradients flushed": step(
        ("g", lambda s, g: torch.where(g.abs() < 1.1754944e-38, g * 0.0, g))
    ),
    "no second moment, no update": step(("u", lambda s, u: torch.where(s.v == 0, u * 0.0, u))),
    "infinite second moment": step(("v", lambda s, v: torch.where(v > 3e38, v * 0 + 3e38, v))),
    "no decay of negative weights": step(("d", lambda s, d: torch.where(s.p < 0, d * 0.0, d))),
    "cautious": step(("u", lambda s, u: torch.where(s.m * s.g < 0, u * 0.0, u))),
    "negative zero lost": step(("new", lambda s, p: p + 0.0)),
    "tiny rate skips": step(skips=lambda s: _found(s) or s.given.item() < 1e-7),
    "host branch on the factor": step(("f", lambda s, f: f * 2 if s.factor.item() > 4096.0 else f)),
}
"""Wrong on a condition."""

OUTSIDE: dict[str, Callable[..., None]] = {
    "found_inf is one": step(skips=lambda s: bool((s.found_inf == 1.0).item())),
    "rate is infinite": step(skips=lambda s: _found(s) or not math.isfinite(s.given.item())),
}
"""Different only where the contract has no value: a flag of 0.5, a rate that is not finite."""


def _moments(s: Now) -> tuple[Tensor, Tensor]:
    return s.b1 * s.m + s.c1 * s.g, s.b2 * s.v + (s.c2 * s.g) * s.g


def _ending(new: Callable[[Now, Tensor, Tensor], Tensor]) -> Callable[..., None]:
    """The usual moments, and another last line."""

    def update(s: Now) -> tuple[Tensor, Tensor, Tensor]:
        m, v = _moments(s)
        return new(s, m, root(v) + s.e), m, v

    return step(update=update)


def _beginning(moments: Callable[[Now], tuple[Tensor, Tensor]]) -> Callable[..., None]:
    """Other moments, and the usual last line."""

    def update(s: Now) -> tuple[Tensor, Tensor, Tensor]:
        m, v = moments(s)
        return s.p - s.lr * (m / (root(v) + s.e) + s.wd * s.p), m, v

    return step(update=update)


MAGNITUDE = _beginning(lambda s: (s.b1 * s.m + s.c1 * s.g, s.b2 * s.v.abs() + (s.c2 * s.g) * s.g))
"""Different only for a second moment below zero, which there is none of."""


def _wide(s: Now) -> tuple[Tensor, Tensor, Tensor]:
    p, g, m, v = (x.double() for x in (s.p, s.g, s.m, s.v))
    m = s.b1.double() * m + s.c1.double() * g
    v = s.b2.double() * v + s.c2.double() * (g * g)
    new = p - s.lr.double() * (m / (v.sqrt() + s.e.double()) + s.wd.double() * p)
    return new.float(), m.float(), v.float()


REORDERED: dict[str, Callable[..., None]] = {
    "m as an interpolation": _beginning(lambda s: (s.m + s.c1 * (s.g - s.m), _moments(s)[1])),
    "m from the other end": _beginning(lambda s: (s.g - s.b1 * (s.g - s.m), _moments(s)[1])),
    "square first": _beginning(lambda s: (_moments(s)[0], s.b2 * s.v + s.c2 * (s.g * s.g))),
    "v with the factor inside": _beginning(
        lambda s: (_moments(s)[0], s.b2 * s.v + ((s.c2 * s.f) * s.grad) * s.g)
    ),
    "v from the gradient": _beginning(
        lambda s: (_moments(s)[0], s.b2 * s.v + s.c2 * ((s.grad * s.grad) * (s.f * s.f)))
    ),
    "decay last": _ending(lambda s, m, d: (s.p - s.lr * (m / d)) - (s.lr * s.wd) * s.p),
    "factor moved": _beginning(lambda s: (s.b1 * s.m + (s.c1 * s.f) * s.grad, _moments(s)[1])),
    "division by one over the factor": _beginning(
        lambda s: (s.b1 * s.m + s.c1 * (s.grad / (1 / s.f)), _moments(s)[1])
    ),
    "reciprocal": _ending(lambda s, m, d: s.p - s.lr * (m * (1 / d) + s.wd * s.p)),
    "rate first": _ending(lambda s, m, d: s.p - ((s.lr * m) / d + s.lr * s.wd * s.p)),
    "rate last": _ending(lambda s, m, d: s.p - (m / d + s.wd * s.p) * s.lr),
    "rate below": _ending(lambda s, m, d: s.p - (m / (d / s.lr) + s.lr * s.wd * s.p)),
    "decay by a factor": _ending(lambda s, m, d: s.p * (1 - s.lr * s.wd) - s.lr * (m / d)),
    "decay afterwards": _ending(lambda s, m, d: (s.p - s.lr * (m / d)) - s.lr * (s.wd * s.p)),
    "negative rate": _ending(lambda s, m, d: s.p + (-s.lr) * (m / d + s.wd * s.p)),
    "negated": _ending(lambda s, m, d: -(s.lr * (m / d + s.wd * s.p) - s.p)),
    "one fraction": _ending(lambda s, m, d: s.p - s.lr * ((m + s.wd * s.p * d) / d)),
    "sides by sign": _ending(
        lambda s, m, d: torch.where(
            s.p > 0,
            s.p - s.lr * (m / d + s.wd * s.p),
            -(s.lr * (m / d + s.wd * s.p) - s.p),
        )
    ),
    "root of four times": step(
        update=lambda s: (
            s.p - s.lr * (_moments(s)[0] / (root(4 * _moments(s)[1]) / 2 + s.e) + s.wd * s.p),
            *_moments(s),
        )
    ),
    "all in float64": step(update=_wide),
}
"""Equal over the real numbers."""
