"""Kernels of apex's LAMB that are wrong: the clip, its options, parts of DeepSpeed's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.apex_lamb import (
    ApexPieces,
    decayed,
    divisor,
    gradient,
    ratio,
    step,
)
from twinstep.parity.proof.corpus.arithmetic import fp32, power, scalar
from twinstep.parity.proof.corpus.calls import ApexLambCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
COMPONENT = "lamb"


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_clip_by_the_scaled_norm(call: ApexLambCall) -> None:
    """The norm is taken as it is stored, with the loss scale in it."""
    scaled = divisor(replace(call, factor=torch.ones(())))

    def clipped(c: ApexLambCall, g: Tensor, p: Tensor) -> Tensor:
        return decayed(c, (fp32(g) * c.factor) / scaled, p)

    step(call, ApexPieces(gradient=clipped))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_small_gradients_stretched(call: ApexLambCall) -> None:
    """Divided by norm / max_norm without a comparison: a small norm is brought to the limit."""

    def stretched(c: ApexLambCall, g: Tensor, p: Tensor) -> Tensor:
        n, largest = c.norm * c.factor, fp32(c.max_norm)
        if bool((largest <= 0) | (n == 0)):
            return gradient(c, g, p)
        return decayed(c, (fp32(g) * c.factor) / (n / largest), p)

    step(call, ApexPieces(gradient=stretched))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_decay_clipped_with_the_gradient(call: ApexLambCall) -> None:
    """The L2 decay is added before the division, and clipped like the gradient."""

    def before(c: ApexLambCall, g: Tensor, p: Tensor) -> Tensor:
        return decayed(c, fp32(g) * c.factor, p) / divisor(c)

    step(call, ApexPieces(gradient=before))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_decay_always_in_the_direction(call: ApexLambCall) -> None:
    """The option adam_w_mode is not read."""
    step(replace(call, adam_w_mode=True))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_gradients_always_averaged(call: ApexLambCall) -> None:
    """The option grad_averaging is not read: beta3 is 1 - beta1."""
    step(replace(call, grad_averaging=True))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_whole_gradient_in_both_moments(call: ApexLambCall) -> None:
    """Without grad_averaging the second moment takes the whole square, too."""
    whole = call if call.grad_averaging else replace(call, beta2=torch.zeros_like(call.beta2))
    step(whole)


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_ratio_without_decay(call: ApexLambCall) -> None:
    """NVLAMB always: weights without decay have a trust ratio."""
    step(replace(call, use_nvlamb=True))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_ratio_never_without_decay(call: ApexLambCall) -> None:
    """NVLAMB never: the option use_nvlamb is not read."""
    step(replace(call, use_nvlamb=False))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_ratio_bounded_as_deepspeeds(call: ApexLambCall) -> None:
    """The trust ratio is kept between 0.01 and 10, as DeepSpeed's."""
    step(call, ApexPieces(ratio=lambda c, p, u: ratio(c, p, u).clamp(0.01, 10.0)))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_correction_in_the_step_size(call: ApexLambCall) -> None:
    """Bias corrections are left to the step size, as DeepSpeed's has them, and eps is not."""
    turn = iter(call.steps)

    def late(c: ApexLambCall, p: Tensor, u: Tensor) -> Tensor:
        t = int(next(turn)) + 1
        if not c.bias_correction:
            return ratio(c, p, u)
        k1, k2 = (1.0 - power(float(beta), t) for beta in (c.beta1, c.beta2))
        return ratio(c, p, u) * scalar(k2**0.5 / k1)

    ones = (torch.ones(()), torch.ones(()))
    step(call, ApexPieces(corrections=lambda c, t: ones, ratio=late))


@wrong(SHELF, "apex_lamb_step", component=COMPONENT)
def apex_ratio_of_the_bare_direction(call: ApexLambCall) -> None:
    """The norm of the direction is taken before the decay is added."""

    def bare(c: ApexLambCall, p: Tensor, u: Tensor) -> Tensor:
        return ratio(c, p, u - fp32(c.weight_decay) * p if c.adam_w_mode else u)

    step(call, ApexPieces(ratio=bare))
