"""Whole mixed-precision steps whose parts are right and whose order or wiring is not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.proof.corpus import adam
from twinstep.parity.proof.corpus.arithmetic import fp32
from twinstep.parity.proof.corpus.calls import AdamCall, MixedCall, WrapperCall, part
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.gradients import combined_scale
from twinstep.parity.proof.corpus.mixed import (
    MixedPieces,
    any_overflow,
    factor_of,
    mixed_step,
    move_scale,
    report_norm,
    unscaled_only,
    update,
)
from twinstep.parity.proof.corpus.scales import update_wrapper
from twinstep.parity.proof.corpus.shelf import wrong

SHELF: list[Entry] = []
COMPONENT = "mixed step"
NON_FINITE = "non_finite"
SKIP = "skipped_step"
FP16 = ("fp16",)


@wrong(SHELF, "mixed_step", "D01", component=COMPONENT, dtypes=FP16)
def scale_updated_before_unscaling(call: MixedCall) -> None:
    """The gradients are divided by the new scale: half the step whenever it grows."""
    mixed_step(call, MixedPieces(scale_moves_first=True))


@wrong(SHELF, "mixed_step", "D20", component=COMPONENT, dtypes=FP16)
def scale_never_updated(call: MixedCall) -> None:
    """The loss-scale rule is not run."""
    mixed_step(call, MixedPieces(move_scale=lambda call: None))


@wrong(SHELF, "mixed_step", "D20", component=COMPONENT, dtypes=FP16)
def rule_without_hysteresis(call: MixedCall) -> None:
    """The dynamic rule is replaced by the wrappers', which has no hysteresis."""

    def move(c: MixedCall) -> None:
        update_wrapper(part(WrapperCall, c)) if c.rule == "dynamic" else move_scale(c)

    mixed_step(call, MixedPieces(move_scale=move))


@wrong(SHELF, "mixed_step", component=COMPONENT, dtypes=FP16)
def static_scale_moves(call: MixedCall) -> None:
    """A static scale is run through the dynamic rule."""
    mixed_step(
        call,
        MixedPieces(
            move_scale=lambda c: move_scale(replace(c, rule="dynamic") if c.rule == "static" else c)
        ),
    )


@wrong(SHELF, "mixed_step", component=COMPONENT, dtypes=FP16)
def idle_counter_advances(call: MixedCall) -> None:
    """The counters of rules that are not in force move along."""

    def move(c: MixedCall) -> None:
        move_scale(c)
        if c.rule != "torch":
            c.growth_tracker.add_(1)

    mixed_step(call, MixedPieces(move_scale=move))


@wrong(SHELF, "mixed_step", "E13", component="norm", dtypes=FP16)
def norm_of_the_scaled_gradients_reported(call: MixedCall) -> None:
    """The reported norm is not divided by the scale."""
    mixed_step(call, MixedPieces(report=lambda c, norm, scale: report_norm(c, norm, 1.0)))


@wrong(SHELF, "mixed_step", component="norm", law=NON_FINITE)
def every_overflow_is_an_infinite_norm(call: MixedCall) -> None:
    """An infinity is reported for a norm that is NaN."""

    def report(c: MixedCall, norm: Tensor, scale: float) -> None:
        report_norm(c, norm.nan_to_num(nan=torch.inf, posinf=torch.inf), scale)

    mixed_step(call, MixedPieces(report=report))


@wrong(SHELF, "mixed_step", "D13", component="norm", dtypes=FP16)
def norm_divided_by_the_new_scale(call: MixedCall) -> None:
    """The reported norm is divided by the scale of the next step."""

    def report(c: MixedCall, norm: Tensor, scale: float) -> None:
        c.norm.copy_(norm.to(torch.float64) / c.scale)

    mixed_step(call, MixedPieces(report=report))


@wrong(SHELF, "mixed_step", "E02", component="clip", dtypes=FP16)
def clip_before_unscaling(call: MixedCall) -> None:
    """max_norm is compared with the norm of the scaled gradients."""

    def factor(c: MixedCall, norm: Tensor) -> Tensor:
        total = combined_scale(float(norm), 1.0, float(c.max_norm)) * float(c.scale)
        return (1.0 / torch.tensor(total, dtype=torch.float64)).to(torch.float32)

    mixed_step(call, MixedPieces(factor=factor))


@wrong(SHELF, "mixed_step", component="clip", dtypes=FP16)
def clipping_forgotten(call: MixedCall) -> None:
    """The factor only unscales."""
    mixed_step(call, MixedPieces(factor=unscaled_only))


@wrong(SHELF, "mixed_step", "B02", component="clip", dtypes=FP16)
def clip_per_tensor(call: MixedCall) -> None:
    """Each tensor is clipped by its own norm, not all by the global one."""

    def each(c: MixedCall, factor: Tensor) -> None:
        whole = part(AdamCall, c, factor=factor)
        for i in range(len(c.params)):
            one = adam.with_lists(whole, adam.only(i))
            norm = torch.linalg.vector_norm(fp32(c.grads[i])) if c.grads[i].numel() else factor * 0
            pieces = adam.ADAMW if c.adam_w_mode else adam.ADAM
            adam.step(replace(one, factor=factor_of(c, norm)), pieces)

    mixed_step(call, MixedPieces(update=each))


@wrong(SHELF, "mixed_step", "D10", "A28", component="unscale", dtypes=FP16)
def mixed_gradient_unscaled_twice(call: MixedCall) -> None:
    """The factor is applied by a pass of its own and again by the update."""
    mixed_step(call, MixedPieces(update=lambda c, factor: update(c, factor * factor)))


@wrong(SHELF, "mixed_step", component="memory", law="nothing_else_written", dtypes=FP16)
def mixed_gradients_unscaled_in_place(call: MixedCall) -> None:
    """The unscaled gradients are left in the caller's tensors."""

    def written(c: MixedCall, factor: Tensor) -> None:
        for g in c.grads:
            g.mul_(factor)
        update(c, torch.ones_like(factor))

    mixed_step(call, MixedPieces(update=written))


@wrong(SHELF, "mixed_step", "C08", component="overflow", dtypes=FP16)
def stale_found_inf_kept(call: MixedCall) -> None:
    """found_inf of the step before is or-ed in: one overflow skips all steps that follow."""
    mixed_step(call, MixedPieces(clears_found_inf=False))


@wrong(SHELF, "mixed_step", "C17", "C22", component="overflow", law=NON_FINITE, dtypes=("bf16",))
def bf16_overflow_not_checked(call: MixedCall) -> None:
    """bf16 gradients are never tested."""
    mixed_step(
        call,
        MixedPieces(
            overflow=lambda grads: any_overflow([g for g in grads if g.dtype != torch.bfloat16])
        ),
    )


@wrong(SHELF, "mixed_step", "C04", component="overflow", law=NON_FINITE, dtypes=("fp32",))
def overflow_from_the_norm(call: MixedCall) -> None:
    """A norm that is inf counts as overflow, although every gradient is finite."""

    def overflow(grads: list[Tensor]) -> bool:
        squares = [(fp32(g) * fp32(g)).sum() for g in grads]
        return not all(bool(torch.isfinite(s)) for s in squares)

    mixed_step(call, MixedPieces(overflow=overflow))


@wrong(SHELF, "mixed_step", "C01", component="overflow", dtypes=FP16)
def step_never_taken(call: MixedCall) -> None:
    """The early return stands outside its condition: only the scale moves."""
    mixed_step(call, MixedPieces(update=lambda c, factor: None))


@wrong(SHELF, "mixed_step", "C22", component="overflow", law=SKIP, dtypes=FP16)
def overflow_seen_but_not_skipped(call: MixedCall) -> None:
    """found_inf is reported, the scale backs off, and the step is taken all the same."""

    def always(c: MixedCall, factor: Tensor) -> None:
        update(replace(c, found_inf=torch.zeros_like(c.found_inf)), factor)

    mixed_step(call, MixedPieces(update=always))


@wrong(SHELF, "mixed_step", component="counters", law=SKIP, dtypes=FP16)
def mixed_step_counted_on_a_skipped_step(call: MixedCall) -> None:
    """A skipped step advances the step counters."""

    def counted(c: MixedCall, factor: Tensor) -> None:
        update(c, factor)
        if float(c.found_inf):
            for t in c.steps:
                t.add_(1)

    mixed_step(call, MixedPieces(update=counted))


@wrong(SHELF, "mixed_step", component="loss scale", law=NON_FINITE, dtypes=FP16)
def overflow_hidden_from_the_rule(call: MixedCall) -> None:
    """The loss-scale rule always hears of a clean step: the scale never backs off."""

    def move(c: MixedCall) -> None:
        move_scale(replace(c, found_inf=torch.zeros_like(c.found_inf)))

    mixed_step(call, MixedPieces(move_scale=move))


@wrong(SHELF, "mixed_step", "A13", component="adam", dtypes=FP16)
def mode_always_adamw(call: MixedCall) -> None:
    """The option adam_w_mode is not read."""
    mixed_step(replace(call, adam_w_mode=True))


@wrong(SHELF, "mixed_step", component="norm", law="every_output_written", dtypes=FP16)
def norm_not_reported(call: MixedCall) -> None:
    """The norm is used and never written."""
    mixed_step(call, MixedPieces(report=lambda c, norm, scale: None))
