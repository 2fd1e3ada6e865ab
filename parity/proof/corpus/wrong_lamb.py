"""LAMB kernels that are wrong: the trust ratio, what it is taken of, and the step size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.proof.corpus import adam
from twinstep.parity.proof.corpus.arithmetic import fp32, power, scalar
from twinstep.parity.proof.corpus.calls import AdamCall, LambCall, part
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.lamb import LambPieces, direction, length, ratio, step, step_size
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
COMPONENT = "lamb"
THREADS = 512


@wrong(SHELF, "lamb_step", "B04", component=COMPONENT)
def lamb_bias_correction_in_the_direction(call: LambCall) -> None:
    """Moments and decay take the corrections apart, where the step size has both of them."""
    turn = iter(call.steps)

    def corrected(c: LambCall, m: Tensor, v: Tensor) -> Tensor:
        t = int(next(turn)) + 1
        on = c.bias_correction
        k1 = scalar(1.0 - power(float(c.beta1), t)) if on else torch.ones(())
        k2 = scalar(1.0 - power(float(c.beta2), t)) if on else torch.ones(())
        return direction(c, m / k1, v / k2)

    step(call, LambPieces(direction=corrected, step_size=lambda c, t: fp32(c.lr)))


SCRATCH: list[float] = [0.0] * THREADS


@wrong(SHELF, "lamb_step", "B05", component=COMPONENT, law="repeat")
def lamb_scratch_of_the_second_phase_not_cleared(call: LambCall) -> None:
    """The partial sums of blocks that a smaller tensor does not have are still those before."""

    def stale(c: LambCall, p: Tensor, u: Tensor) -> Tensor:
        parts = [length(part) ** 2 for part in p.reshape(-1).split(64)]
        for place, square in enumerate(parts[:THREADS]):
            SCRATCH[place] = float(square)
        w = torch.tensor(sum(SCRATCH)).sqrt()
        n = length(u)
        if float(n) == 0.0:
            return torch.ones(())
        return torch.maximum(torch.minimum(w / n, fp32(c.max_coeff)), fp32(c.min_coeff))

    step(call, LambPieces(ratio=stale))


@wrong(SHELF, "lamb_step", "B13", component=COMPONENT)
def lamb_dispatched_to_adam(call: LambCall) -> None:
    """The table of kernels has AdamW where LAMB is asked for."""
    adam.step(part(AdamCall, call))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_ratio_left_out(call: LambCall) -> None:
    """The trust ratio is one."""
    step(call, LambPieces(ratio=lambda c, p, u: torch.ones(())))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_ratio_upside_down(call: LambCall) -> None:
    """Norm of the direction over norm of the weights."""
    step(call, LambPieces(ratio=lambda c, p, u: ratio(c, u, p)))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_bounds_swapped(call: LambCall) -> None:
    """Kept above the largest and below the smallest trust ratio."""
    step(replace(call, max_coeff=call.min_coeff, min_coeff=call.max_coeff))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_ratio_of_the_bare_direction(call: LambCall) -> None:
    """The norm of the direction is taken before the decay is added."""
    wd = fp32(call.weight_decay)
    step(call, LambPieces(ratio=lambda c, p, u: ratio(c, p, u - wd * p)))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_zero_norm_gives_the_lower_bound(call: LambCall) -> None:
    """Weights of zero get the smallest ratio, where it should be one: they never start to move."""

    def bounded(c: LambCall, p: Tensor, u: Tensor) -> Tensor:
        return fp32(c.min_coeff) if not bool(p.any()) else ratio(c, p, u)

    step(call, LambPieces(ratio=bounded))


@wrong(SHELF, "lamb_step", component=COMPONENT, law="permutation")
def lamb_one_ratio_for_all_tensors(call: LambCall) -> None:
    """The first tensor's trust ratio serves the whole list."""
    kept: list[Tensor] = []

    def first(c: LambCall, p: Tensor, u: Tensor) -> Tensor:
        kept.append(ratio(c, p, u))
        return kept[0]

    step(call, LambPieces(ratio=first))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_adds_up_1024_partial_sums(call: LambCall) -> None:
    """Both norms leave out what lies past 1,024 blocks of 1,024 elements."""
    kept = 2**20
    ends = LambPieces(ratio=lambda c, p, u: ratio(c, p.view(-1)[:kept], u.view(-1)[:kept]))
    step(call, ends)


@wrong(SHELF, "lamb_step", component=COMPONENT, arithmetic="exact", dtypes=("bf16", "fp32"))
def lamb_norms_summed_in_float64(call: LambCall) -> None:
    """Claims to be exact, but adds the squares of weights in float64, each sum rounded."""

    def rounded(c: LambCall, p: Tensor, u: Tensor) -> Tensor:
        return ratio(c, scalar(float(p.double().square().sum().sqrt())), u)

    step(call, LambPieces(ratio=rounded))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_eps_always_outside(call: LambCall) -> None:
    """The option eps_inside_sqrt is not read."""
    step(replace(call, eps_inside_sqrt=False))


@wrong(SHELF, "lamb_step", component=COMPONENT)
def lamb_step_size_without_the_root(call: LambCall) -> None:
    """The step size lacks a root: lr * (1 - beta2**t) / (1 - beta1**t)."""

    def rootless(c: LambCall, t: int) -> Tensor:
        lr, beta1, beta2 = float(c.lr), float(c.beta1), float(c.beta2)
        if not c.bias_correction:
            return step_size(c, t)
        return scalar(lr * (1.0 - power(beta2, t)) / (1.0 - power(beta1, t)))

    step(call, LambPieces(step_size=rootless))
