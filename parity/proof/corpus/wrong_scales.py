"""Loss-scale rules that are wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from twinstep.parity.proof.corpus.calls import DynamicCall, TorchScaleCall, WrapperCall
from twinstep.parity.proof.corpus.entry import Entry
from twinstep.parity.proof.corpus.scales import (
    TrackerPieces,
    WindowPieces,
    grows_after_window,
    shrunk,
    update_dynamic,
    update_torch,
    update_wrapper,
)
from twinstep.parity.proof.corpus.shelf import Faults, plant, wrong

SHELF: list[Entry] = []
COMPONENT = "loss scale"


def early(cur_iter: int, last_overflow: int, window: int) -> bool:
    """(I - L) mod window: one step early."""
    return (cur_iter - last_overflow) % window == 0


def also_at_zero(cur_iter: int, last_overflow: int, window: int) -> bool:
    """The growth test without q > 0."""
    return (cur_iter - last_overflow - 1) % window == 0


def from_the_second(cur_iter: int, last_overflow: int, window: int) -> bool:
    """The growth test with q > 1 for q > 0: wrong with a window of one alone."""
    q = cur_iter - last_overflow - 1
    return q > 1 and q % window == 0


DYNAMIC: Faults[WindowPieces] = {
    "hysteresis_ignored": (
        "Every overflow shrinks the scale.",
        WindowPieces(patience=False),
        "D20",
    ),
    "hysteresis_never_refilled": (
        "Once spent, the hysteresis stays spent.",
        WindowPieces(refills=False),
        "D19",
    ),
    "hysteresis_refilled_by_every_clean_step": (
        "Any clean step refills it, consecutive or not.",
        WindowPieces(refills_on_every_clean_step=True),
        "D19",
    ),
    "hysteresis_spent_when_shrinking": (
        "An overflow that shrinks the scale also takes one off the hysteresis.",
        WindowPieces(spends_when_shrinking=True),
    ),
    "growth_one_step_early": (
        "The window is counted from the overflow itself.",
        WindowPieces(grows=early),
    ),
    "growth_right_after_an_overflow": (
        "The first clean step after an overflow grows the scale.",
        WindowPieces(grows=also_at_zero),
    ),
    "growth_from_the_second_clean_step": (
        "The first clean step never grows the scale, with a window of one neither.",
        WindowPieces(grows=from_the_second),
    ),
    "growth_never": ("The scale only shrinks.", WindowPieces(grows=lambda *_: False)),
    "floor_not_honoured": (
        "The scale shrinks below min_scale.",
        WindowPieces(shrunk=lambda scale, factor, floor: scale / factor),
    ),
    "overflow_not_counted": (
        "A skipped step does not advance cur_iter.",
        WindowPieces(counts_overflows=False),
    ),
    "overflow_not_remembered": (
        "last_overflow_iter stays where it was, so the window never starts over.",
        WindowPieces(remembers_overflows=False),
    ),
    "overflow_grows_the_scale": (
        "An overflow multiplies where it should divide.",
        WindowPieces(shrunk=lambda scale, factor, floor: max(scale * factor, floor)),
    ),
}
plant(partial(wrong, SHELF, "update_scale_dynamic", component=COMPONENT), update_dynamic, DYNAMIC)


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def consecutive_hysteresis_ignored(call: DynamicCall) -> None:
    """The option consecutive_hysteresis is not read."""
    update_dynamic(replace(call, consecutive_hysteresis=False))


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def scale_below_the_floor_stays(call: DynamicCall) -> None:
    """A scale that is below the floor already is left there, not raised to it."""

    def rule(scale: float, factor: float, floor: float) -> float:
        return scale if scale < floor else shrunk(scale, factor, floor)

    update_dynamic(call, WindowPieces(shrunk=rule))


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def exhaustion_not_reported(call: DynamicCall) -> None:
    """An overflow at the floor is taken like any other."""
    update_dynamic(replace(call, raise_error_at_min_scale=False))


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def exhaustion_counts_the_step(call: DynamicCall) -> None:
    """An overflow at the floor is reported, and the counters move all the same."""
    before = call.exhausted.clone()
    last = call.cur_iter.clone()
    call.exhausted.zero_()
    update_dynamic(call)
    if int(call.exhausted):
        call.last_overflow_iter.copy_(last)
        call.cur_iter.add_(1)
    call.exhausted.copy_(torch.maximum(call.exhausted, before))


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def exhaustion_cleared(call: DynamicCall) -> None:
    """A call that is not exhausted clears the mark of an earlier one."""
    call.exhausted.zero_()
    update_dynamic(call)


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def scale_factor_is_two(call: DynamicCall) -> None:
    """The factor is written into the code."""
    update_dynamic(replace(call, scale_factor=torch.full_like(call.scale_factor, 2.0)))


@wrong(SHELF, "update_scale_dynamic", component=COMPONENT)
def iterations_in_int32(call: DynamicCall) -> None:
    """cur_iter is taken for a 32-bit number."""
    narrow = call.cur_iter.to(torch.int32).to(torch.int64)
    call.cur_iter.copy_(narrow)
    update_dynamic(call)


@wrong(SHELF, "update_scale_dynamic", component="precision")
def scale_in_fp16(call: DynamicCall) -> None:
    """The new scale passes through fp16: 65536 is inf."""
    update_dynamic(call)
    call.scale.copy_(call.scale.to(torch.float16))


WRAPPER: Faults[WindowPieces] = {
    "wrapper_growth_one_step_early": (
        "The window is counted from the overflow itself.",
        WindowPieces(grows=early),
    ),
    "wrapper_growth_right_after_an_overflow": (
        "The first clean step after an overflow grows the scale.",
        WindowPieces(grows=also_at_zero),
    ),
    "wrapper_growth_from_the_second_clean_step": (
        "The first clean step never grows the scale, with a window of one neither.",
        WindowPieces(grows=from_the_second),
    ),
    "wrapper_floor_not_honoured": (
        "The scale shrinks below min_scale.",
        WindowPieces(shrunk=lambda scale, factor, floor: scale / factor),
    ),
    "wrapper_overflow_not_remembered": (
        "last_overflow_iter stays where it was.",
        WindowPieces(remembers_overflows=False),
    ),
    "wrapper_overflow_not_counted": (
        "A skipped step does not advance cur_iter.",
        WindowPieces(counts_overflows=False),
    ),
}
plant(partial(wrong, SHELF, "update_scale_wrapper", component=COMPONENT), update_wrapper, WRAPPER)


@wrong(SHELF, "update_scale_wrapper", component=COMPONENT)
def wrapper_grows_one_window_late(call: WrapperCall) -> None:
    """The first growth is missed: q must be above the window."""

    def late(cur_iter: int, last_overflow: int, window: int) -> bool:
        q = cur_iter - last_overflow - 1
        return q > window and grows_after_window(cur_iter, last_overflow, window)

    update_wrapper(call, WindowPieces(grows=late))


TORCH: Faults[TrackerPieces] = {
    "scale_grows_to_infinity": (
        "The grown scale is not tested: it becomes inf and stays.",
        TrackerPieces(accepts=lambda grown: True),
        "D02",
    ),
    "tracker_survives_an_overflow": (
        "An overflow does not start the interval over.",
        TrackerPieces(resets_on_overflow=False),
    ),
    "tracker_survives_growth": (
        "Growth does not start the interval over.",
        TrackerPieces(resets_on_growth=False),
    ),
    "interval_one_too_long": (
        "The scale grows on the step after the interval-th.",
        TrackerPieces(due=lambda successes, interval: successes > interval),
    ),
    "backoff_stops_at_one": (
        "The scale never goes below one, a floor that this rule does not have.",
        TrackerPieces(floor=1.0),
    ),
}
plant(partial(wrong, SHELF, "update_scale_torch", component=COMPONENT), update_torch, TORCH)


@wrong(SHELF, "update_scale_torch", component="precision")
def scale_not_rounded_to_fp32(call: TorchScaleCall) -> None:
    """The scale keeps all the bits of the float64 product."""
    update_torch(call, TrackerPieces(rounded=float))


@wrong(SHELF, "update_scale_torch", component="precision")
def factors_rounded_before_the_product(call: TorchScaleCall) -> None:
    """Growth and backoff factor are rounded to fp32 first: the product is rounded twice."""
    growth, backoff = (
        x.to(torch.float32).to(torch.float64) for x in (call.growth_factor, call.backoff_factor)
    )
    update_torch(replace(call, growth_factor=growth, backoff_factor=backoff))
