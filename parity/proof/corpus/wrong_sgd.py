"""SGD kernels that are wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import SgdCall, skipped
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.sgd import Scalars, SgdPieces, buffer, step
from twinstep.parity.proof.corpus.shelf import Faults, plant, wrong

SHELF: list[Entry] = []
COMPONENT = "sgd"
SKIP = "skipped_step"
MIXED = ("bf16", "fp16")


FORMULAS: Faults[SgdPieces] = {
    "dampening_at_the_first_step": (
        "The buffer starts with (1 - dampening) * g.",
        SgdPieces(buffer=lambda s, b, g, t: s.damp * g if t == 1 else s.mu * b + s.damp * g),
    ),
    "buffer_not_started_over": (
        "The first step reads what lies in the buffer.",
        SgdPieces(buffer=lambda s, b, g, t: s.mu * b + s.damp * g),
    ),
    "buffer_started_over_at_every_step": (
        "The buffer is the gradient, always: momentum never builds.",
        SgdPieces(buffer=lambda s, b, g, t: g),
    ),
    "sgd_weight_decay_decoupled": (
        "The decay goes to the weight directly and never reaches the buffer.",
        SgdPieces(
            decayed=lambda s, g, p: g,
            apply=lambda s, p, d: p - s.lr * (d + s.wd * p),
        ),
        "A13",
    ),
    "sgd_weight_decay_left_out": (
        "The decay term is missing.",
        SgdPieces(decayed=lambda s, g, p: g),
        "A43",
    ),
    "learning_rate_inside_the_buffer": (
        "The buffer collects lr * g, so a change of lr acts late.",
        SgdPieces(
            buffer=lambda s, b, g, t: buffer(s, b, s.lr * g, t),
            apply=lambda s, p, d: p - d,
        ),
    ),
    "sgd_ascent": ("P + lr * d: the step climbs.", SgdPieces(apply=lambda s, p, d: p + s.lr * d)),
}
plant(partial(wrong, SHELF, "sgd_step", component=COMPONENT), step, FORMULAS)


@wrong(SHELF, "sgd_step", component=COMPONENT)
def dampening_left_out(call: SgdCall) -> None:
    """Every gradient enters the buffer with weight one."""
    step(replace(call, dampening=torch.zeros_like(call.dampening)))


@wrong(SHELF, "sgd_step", "A31", component=COMPONENT)
def buffer_not_written(call: SgdCall) -> None:
    """The momentum buffer is computed out of place and dropped."""
    step(replace(call, momentums=[b.clone() for b in call.momentums]))


@wrong(SHELF, "sgd_step", component=COMPONENT)
def nesterov_ignored(call: SgdCall) -> None:
    """The option nesterov is not read."""
    step(replace(call, nesterov=False))


@wrong(SHELF, "sgd_step", component=COMPONENT)
def nesterov_looks_back(call: SgdCall) -> None:
    """Nesterov uses the buffer of the step before."""
    before: list[Tensor] = []

    def remembered(s: Scalars, b: Tensor, g: Tensor, t: int) -> Tensor:
        before.append(b)
        return buffer(s, b, g, t)

    def direction(s: Scalars, b: Tensor, g: Tensor, nesterov: bool) -> Tensor:
        return g + s.mu * before[-1] if nesterov else b

    step(call, SgdPieces(buffer=remembered, direction=direction))


@wrong(SHELF, "sgd_step", "A28", component="unscale")
def sgd_gradient_unscaled_twice(call: SgdCall) -> None:
    """The gradient is multiplied by the factor two times."""
    step(replace(call, factor=call.factor * call.factor))


@wrong(SHELF, "sgd_step", component="counters")
def sgd_counts_only_with_momentum(call: SgdCall) -> None:
    """Without momentum buffers the step counters stay."""
    step(call, SgdPieces(counts=bool(call.momentums)))


@wrong(SHELF, "sgd_step", component=COMPONENT, law="non_finite")
def full_dampening_drops_the_gradient(call: SgdCall) -> None:
    """With a dampening of 1 the buffer takes no gradient in, an infinite one neither."""

    def undamped(s: Scalars, b: Tensor, g: Tensor, t: int) -> Tensor:
        return s.mu * b if t > 1 and float(s.damp) == 0.0 else buffer(s, b, g, t)

    step(call, SgdPieces(buffer=undamped))


@wrong(SHELF, "sgd_step", component="overflow", law=SKIP)
def sgd_step_counted_on_a_skipped_step(call: SgdCall) -> None:
    """A skipped step advances the counters, so the buffer is never started."""
    if skipped(call):
        for t in call.steps:
            t.add_(1)
    step(call)


@wrong(SHELF, "sgd_step", "A29", component="overflow", law=SKIP)
def sgd_overflow_ignored(call: SgdCall) -> None:
    """found_inf is not read."""
    step(replace(call, found_inf=torch.zeros_like(call.found_inf)))


@wrong(SHELF, "sgd_step", "A22", component="precision", dtypes=("bf16-pure",))
def sgd_update_in_bf16(call: SgdCall) -> None:
    """The product of lr and d is rounded to bf16 before it is subtracted."""
    step(call, SgdPieces(apply=lambda s, p, d: p - fp32((s.lr * d).to(torch.bfloat16))))


@wrong(SHELF, "sgd_step", component="memory", law="nothing_else_written", dtypes=("fp32",))
def nesterov_looks_ahead_in_the_gradient(call: SgdCall) -> None:
    """Nesterov adds to the gradient in place where nothing has made a copy of it."""
    step(call)
    if call.nesterov and not skipped(call) and float(call.factor) == 1.0 and not call.weight_decay:
        for grad, own in zip(call.grads, call.momentums, strict=False):
            grad.add_(own * fp32(call.momentum))


@wrong(SHELF, "sgd_step", component="copies", law="every_output_written")
def sgd_copies_forgotten(call: SgdCall) -> None:
    """The low-precision copies are never written."""
    step(replace(call, copies=[]))


@wrong(SHELF, "sgd_step", component="layout", law="strided", dtypes=MIXED, claims=("strided",))
def copies_taken_to_lie_as_weights(call: SgdCall) -> None:
    """Copies by rows are filled in the order of the weights, which lie by columns."""
    step(call)
    for param, copy in zip(call.params, call.copies, strict=False):
        crossed = param.dim() == 2 and param.t().is_contiguous() and copy.is_contiguous()
        if crossed and not skipped(call):
            copy.view(-1).copy_(param.t().reshape(-1))
