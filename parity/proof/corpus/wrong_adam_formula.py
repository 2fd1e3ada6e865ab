"""Adam and AdamW kernels with one formula wrong: constants, moments, direction, decay, update."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.adam import ADAM, ADAMW, AdamPieces, Scalars, scalars, step
from twinstep.parity.proof.corpus.arithmetic import fp32, power, scalar, sqrt_rn
from twinstep.parity.proof.corpus.calls import AdamCall, skipped
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import Faults, plant, wrong

SHELF: list[Entry] = []
COMPONENT = "adam"


FORMULAS: Faults[AdamPieces] = {
    "eps_inside_the_square_root": (
        "sqrt(v/k2 + eps), not sqrt(v/k2) + eps.",
        AdamPieces(denominator=lambda s, v: sqrt_rn(v / s.k2 + s.eps)),
    ),
    "eps_before_the_bias_correction": (
        "(sqrt(v) + eps) / sqrt(k2): eps is scaled with the root of the second moment.",
        AdamPieces(denominator=lambda s, v: (sqrt_rn(v) + s.eps) / sqrt_rn(s.k2)),
        "A11",
    ),
    "eps_left_out": (
        "The denominator is sqrt(v/k2): zero moments give 0/0.",
        AdamPieces(denominator=lambda s, v: sqrt_rn(v / s.k2)),
    ),
    "eps_as_a_floor": (
        "max(sqrt(v/k2), eps), not their sum.",
        AdamPieces(denominator=lambda s, v: torch.maximum(sqrt_rn(v / s.k2), s.eps)),
    ),
    "weight_decay_coupled": ("AdamW adds the decay to the gradient, as Adam does.", ADAM, "A13"),
    "weight_decay_left_out": ("The decay term is missing.", AdamPieces(decay=lambda s, u, p: u)),
    "weight_decay_without_the_learning_rate": (
        "P shrinks by wd instead of lr * wd.",
        AdamPieces(decay=lambda s, u, p: u, apply=lambda s, p, u: p - s.lr * u - s.wd * p),
    ),
    "weight_decay_takes_the_bias_correction": (
        "The decay is divided by k1 along with the first moment.",
        AdamPieces(decay=lambda s, u, p: u + s.wd * p / s.k1),
    ),
    "ascent": ("P + lr * u: the step climbs.", AdamPieces(apply=lambda s, p, u: p + s.lr * u)),
    "bias_correction_of_the_step_before": (
        "The correction is 1 - beta**t with the stored t, not t + 1: zero at the first step.",
        AdamPieces(count=lambda c, i: int(c.steps[i])),
    ),
    "bias_correction_frozen_at_step_one": (
        "The step number was baked in when the first step was recorded.",
        AdamPieces(count=lambda c, i: 1),
        "I11",
    ),
    "second_moment_of_the_magnitude": (
        "V averages |g|, not g squared.",
        AdamPieces(second=lambda s, v, g: s.b2 * v + s.c2 * g.abs()),
    ),
    "second_moment_keeps_its_maximum": (
        "V never shrinks, as in AMSGrad, which was not asked for.",
        AdamPieces(second=lambda s, v, g: torch.maximum(v, s.b2 * v + (s.c2 * g) * g)),
    ),
    "gradient_never_reaches_the_first_moment": (
        "`m.mul_(b1).add(g)` without the second underscore: the sum is dropped.",
        AdamPieces(first=lambda s, m, g: s.b1 * m),
        "A31",
    ),
    "update_clamped_to_one": (
        "The direction is clamped to [-1, 1], which Adam only promises on average.",
        AdamPieces(direction=lambda s, m, denom: ((m / s.k1) / denom).clamp(-1.0, 1.0)),
    ),
}
plant(partial(wrong, SHELF, "adamw_step", component=COMPONENT), step, FORMULAS)


@wrong(SHELF, "adam_step", "A11", component=COMPONENT)
def eps_and_step_size_fold_the_bias_correction(call: AdamCall) -> None:
    """Lr * sqrt(k2) / k1 * m / (sqrt(v) + eps), as in the first listing of the paper."""

    def direction(s: Scalars, m: Tensor, denom: Tensor) -> Tensor:
        return sqrt_rn(s.k2) / s.k1 * (m / denom)

    step(call, replace(ADAM, denominator=lambda s, v: sqrt_rn(v) + s.eps, direction=direction))


@wrong(SHELF, "adam_step", "A13", component=COMPONENT)
def weight_decay_decoupled(call: AdamCall) -> None:
    """Adam adds the decay to the update, as AdamW does."""
    step(call, ADAMW)


@wrong(SHELF, "adam_step", "A43", component=COMPONENT)
def weight_decay_in_the_second_moment_only(call: AdamCall) -> None:
    """L2 decay reaches v, and m takes the bare gradient."""
    bare = [fp32(g) * call.factor for g in call.grads]
    turn = iter(bare)
    step(call, replace(ADAM, first=lambda s, m, g: s.b1 * m + s.c1 * next(turn)))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def weight_decay_of_the_updated_weight(call: AdamCall) -> None:
    """Decay is taken after the Adam update, from the new p."""

    def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        moved = p - s.lr * u
        return moved - s.lr * (s.wd * moved)

    step(call, AdamPieces(decay=lambda s, u, p: u, apply=apply))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def betas_swapped(call: AdamCall) -> None:
    """beta1 and beta2 change places."""
    step(replace(call, beta1=call.beta2, beta2=call.beta1))


@wrong(SHELF, "adamw_step", "B01", component=COMPONENT)
def second_moment_decays_with_beta1(call: AdamCall) -> None:
    """beta2 is read from where beta1 is."""
    step(replace(call, beta2=call.beta1))


@wrong(SHELF, "adamw_step", "B11", component=COMPONENT)
def first_moment_never_remembers(call: AdamCall) -> None:
    """beta1 is passed as zero."""
    step(replace(call, beta1=torch.zeros_like(call.beta1)))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def one_minus_beta_in_fp32(call: AdamCall) -> None:
    """1 - beta is formed from the rounded beta, in fp32."""

    def formed(c: AdamCall, t: int) -> Scalars:
        s = scalars(c, t)
        return replace(s, c1=1.0 - s.b1, c2=1.0 - s.b2)

    step(call, AdamPieces(scalars=formed))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def bias_correction_in_fp32(call: AdamCall) -> None:
    """1 - beta**t is formed in fp32: few of its bits are right for beta close to one."""

    def formed(c: AdamCall, t: int) -> Scalars:
        s = scalars(c, t)
        if not c.bias_correction:
            return s
        k1, k2 = (1.0 - scalar(power(float(b), t)) for b in (s.b1, s.b2))
        return replace(s, k1=k1, k2=k2)

    step(call, AdamPieces(scalars=formed))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def learning_rate_in_bf16(call: AdamCall) -> None:
    """The learning rate passes through bf16."""
    step(replace(call, lr=call.lr.to(torch.bfloat16).to(torch.float64)))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def bias_correction_missing(call: AdamCall) -> None:
    """k1 and k2 are one although bias correction is on."""
    step(replace(call, bias_correction=False))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def bias_correction_always_on(call: AdamCall) -> None:
    """The option bias_correction is not read."""
    step(replace(call, bias_correction=True))


@wrong(SHELF, "adamw_step", "A23", component=COMPONENT)
def step_counter_in_bf16(call: AdamCall) -> None:
    """The step number passes through bf16, which has no integers between 256 and 258."""

    def count(c: AdamCall, i: int) -> int:
        return int((c.steps[i] + 1).to(torch.bfloat16))

    step(call, AdamPieces(count=count))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def second_moment_is_stale(call: AdamCall) -> None:
    """The update divides by the root of the second moment of the step before."""
    before = iter([v.clone() for v in call.exp_avg_sqs])
    step(call, AdamPieces(denominator=lambda s, v: sqrt_rn(next(before) / s.k2) + s.eps))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def direction_is_the_bare_gradient(call: AdamCall) -> None:
    """U takes g in place of m, as if beta1 were zero in the update alone."""
    grads = iter([fp32(g) * call.factor for g in call.grads])
    step(call, AdamPieces(direction=lambda s, m, denom: (next(grads) / s.k1) / denom))


@wrong(SHELF, "adamw_step", "A28", "D10", component="unscale")
def gradient_unscaled_twice(call: AdamCall) -> None:
    """The gradient is multiplied by the factor two times."""
    step(call, AdamPieces(gradient=lambda grad, factor: (fp32(grad) * factor) * factor))


@wrong(SHELF, "adamw_step", component="unscale")
def gradient_never_unscaled(call: AdamCall) -> None:
    """The factor is ignored."""
    step(call, AdamPieces(gradient=lambda grad, factor: fp32(grad)))


@wrong(SHELF, "adamw_step", component="unscale")
def gradient_divided_by_the_factor(call: AdamCall) -> None:
    """The gradient is divided by the factor, which is already an inverse scale."""
    step(call, AdamPieces(gradient=lambda grad, factor: fp32(grad) / factor))


@wrong(SHELF, "adamw_step", component="unscale")
def second_moment_of_the_scaled_gradient(call: AdamCall) -> None:
    """V squares the gradient before it is unscaled."""
    raw = iter([fp32(g) for g in call.grads])

    def second(s: Scalars, v: Tensor, g: Tensor) -> Tensor:
        scaled = next(raw)
        return s.b2 * v + (s.c2 * scaled) * scaled

    step(call, AdamPieces(second=second))


@wrong(SHELF, "adamw_step", component="overflow", law="non_finite", dtypes=("fp32",))
def non_finite_update_hidden(call: AdamCall) -> None:
    """A NaN or inf in the update is replaced by zero, without a report."""
    step(
        call,
        AdamPieces(
            apply=lambda s, p, u: p - torch.nan_to_num(s.lr * u, nan=0.0, posinf=0.0, neginf=0.0)
        ),
    )


@wrong(SHELF, "adamw_step", component=COMPONENT)
def update_flushes_subnormals(call: AdamCall) -> None:
    """A second moment below 2**-126 is taken for zero."""

    def second(s: Scalars, v: Tensor, g: Tensor) -> Tensor:
        new = s.b2 * v + (s.c2 * g) * g
        return torch.where(new.abs() < 2.0**-126, torch.zeros_like(new), new)

    step(call, AdamPieces(second=second))


@wrong(SHELF, "adamw_step", "I07", component=COMPONENT, arithmetic="exact")
def square_root_of_the_library(call: AdamCall) -> None:
    """Claims to be exact, but takes a reciprocal root, which rounds twice."""

    def denominator(s: Scalars, v: Tensor) -> Tensor:
        return 1.0 / torch.rsqrt(v / s.k2) + s.eps

    step(call, AdamPieces(denominator=denominator))


@wrong(SHELF, "adamw_step", component=COMPONENT, arithmetic="exact")
def factored_decay_claimed_exact(call: AdamCall) -> None:
    """Claims to be exact, but writes p * (1 - lr * wd) - lr * u."""

    def apply(s: Scalars, p: Tensor, u: Tensor) -> Tensor:
        return p * (1.0 - s.lr * s.wd) - s.lr * u

    step(call, AdamPieces(decay=lambda s, u, p: u, apply=apply))


@wrong(SHELF, "adamw_step", component=COMPONENT)
def weight_decay_scheduled_by_the_step(call: AdamCall) -> None:
    """The decay is divided by the square root of the step number."""
    turn = iter([math.sqrt(float(t) + 1.0) for t in call.steps])
    step(call, AdamPieces(decay=lambda s, u, p: u + s.wd * p / scalar(next(turn))))


@wrong(SHELF, "adamw_step", "C01", component="overflow")
def every_step_is_skipped(call: AdamCall) -> None:
    """The return stands one indent too far left: no step is ever taken."""
    if skipped(call):
        return
    return
