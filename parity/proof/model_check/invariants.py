"""Invariants of each rule, stated of one step: what may happen, not how it is computed.

A general law over all rules would be false: an overflow may raise a scale that is below the floor,
an overflow at a hysteresis of 0 lowers nothing, torch has no floor, and factors need not be powers
of two.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import cast

from twinstep.parity.proof.model_check.explore import Configuration
from twinstep.reference.loss_scale import DynamicRule, ScaleState, TorchRule, WrapperRule

Law = Callable[[Configuration, ScaleState, bool, ScaleState], Iterator[str]]


def broken(
    configuration: Configuration, before: ScaleState, overflow: bool, after: ScaleState
) -> list[str]:
    """The invariants that a step breaks, one sentence each."""
    return list(LAWS[configuration.kind](configuration, before, overflow, after))


def _dynamic(
    configuration: Configuration, before: ScaleState, overflow: bool, after: ScaleState
) -> Iterator[str]:
    rule = cast(DynamicRule, configuration.rule)
    shift, budget = rule.delayed_shift, before.cur_hysteresis
    if after.exhausted:
        if not (overflow and rule.raise_error_at_min_scale and before.scale == rule.min_scale):
            yield "it is exhausted elsewhere than at an overflow at a floor that raises"
        if _moved(before, after) != {"exhausted"}:
            yield "an exhausted scaler has moved"
        return
    yield from _counted(before, overflow, after)
    if after.cur_hysteresis > max(shift, budget):
        yield "there is more hysteresis than at first"
    if overflow:
        yield from _shrinks(before, after, rule.min_scale, spent=budget == 1 or shift == 1)
        if after.cur_hysteresis not in (budget, budget - 1):
            yield "an overflow spent more than one of the hysteresis"
        if after.cur_hysteresis < budget and after.scale != before.scale:
            yield "an overflow was forgiven and lowered the scale"
        return
    window, early = rule.scale_window, rule.growth_counts_this_step
    yield from _grows(before, after, window, early)
    refilled = after.scale != before.scale or rule.consecutive_hysteresis
    if math.isfinite(before.scale) and after.cur_hysteresis != (shift if refilled else budget):
        yield "the hysteresis is refilled by growth, or by every clean step, and by nothing else"


def _wrapper(
    configuration: Configuration, before: ScaleState, overflow: bool, after: ScaleState
) -> Iterator[str]:
    rule = cast(WrapperRule, configuration.rule)
    yield from _counted(before, overflow, after)
    if overflow:
        yield from _shrinks(before, after, rule.min_scale, spent=True)
    else:
        yield from _grows(before, after, rule.scale_window, False)


def _torch(
    configuration: Configuration, before: ScaleState, overflow: bool, after: ScaleState
) -> Iterator[str]:
    rule = cast(TorchRule, configuration.rule)
    if after.scale != struct.unpack("f", struct.pack("f", after.scale))[0]:
        yield "the scale is no fp32 number"
    if not 0 <= after.growth_tracker < rule.growth_interval:
        yield "the tracker is not below the interval"
    if overflow and (after.growth_tracker or after.scale > before.scale):
        yield "an overflow left clean steps counted, or raised the scale"
    if not overflow:
        due = before.growth_tracker + 1 == rule.growth_interval
        if after.growth_tracker != (0 if due else before.growth_tracker + 1):
            yield "a clean step counts one, or starts anew after the interval"
        if after.scale < before.scale or (after.scale > before.scale and not due):
            yield "the scale grows with the last step of an interval, and never falls"
    if not math.isfinite(after.scale):
        yield "the scale is not finite"


def _static(
    configuration: Configuration, before: ScaleState, overflow: bool, after: ScaleState
) -> Iterator[str]:
    del configuration, overflow
    if _moved(before, after) != {"cur_iter"}:
        yield "a static scale moved"


def _moved(before: ScaleState, after: ScaleState) -> set[str]:
    pairs = vars(after)
    return {name for name, value in vars(before).items() if pairs[name] != value}


def _counted(before: ScaleState, overflow: bool, after: ScaleState) -> Iterator[str]:
    if after.cur_iter != before.cur_iter + 1:
        yield "a step is counted once"
    if after.last_overflow_iter != (before.cur_iter if overflow else before.last_overflow_iter):
        yield "the last overflow is the step that overflowed last"


def _shrinks(before: ScaleState, after: ScaleState, floor: float, *, spent: bool) -> Iterator[str]:
    if not spent and after.scale != before.scale:
        yield "an overflow moved the scale before the hysteresis was spent"
    if spent and before.scale >= 2 * floor and after.scale != before.scale / 2:
        yield "an overflow halves a scale that is at least twice the floor"
    if spent and before.scale < 2 * floor and after.scale != floor:
        yield "an overflow leads a scale below twice the floor to the floor"


def _grows(before: ScaleState, after: ScaleState, window: int, early: bool) -> Iterator[str]:
    """Clean steps since the last overflow, with this one: growth after a window, or with it."""
    clean = before.cur_iter - before.last_overflow_iter
    behind = clean if early else clean - 1
    if after.scale == before.scale:
        if behind and behind % window == 0 and math.isfinite(before.scale):
            yield "the scale did not grow when a window was full"
    elif after.scale != 2 * before.scale:
        yield "a clean step moved the scale otherwise than by doubling it"
    elif behind < window or behind % window:
        yield "the scale grew within a window"


LAWS: dict[str, Law] = {
    "dynamic": _dynamic,
    "wrapper": _wrapper,
    "torch": _torch,
    "static": _static,
}
