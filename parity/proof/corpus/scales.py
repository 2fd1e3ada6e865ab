"""Correct loss-scale rules over plain numbers, with every decision as a field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.parity.proof.corpus.calls import DynamicCall, TorchScaleCall, WrapperCall


def put_scale(target: Tensor, value: float) -> None:
    """Write a float64 number."""
    target.copy_(torch.tensor(value, dtype=torch.float64))


def grows_after_window(cur_iter: int, last_overflow: int, window: int) -> bool:
    """True if q = I - L - 1 is a positive multiple of the window."""
    q = cur_iter - last_overflow - 1
    return q > 0 and q % window == 0


def shrunk(scale: float, factor: float, floor: float) -> float:
    """max(scale / factor, floor)."""
    return max(scale / factor, floor)


@dataclass(frozen=True, kw_only=True)
class WindowPieces:
    """The decisions of the two rules that count iterations; the defaults are right."""

    grows: Callable[[int, int, int], bool] = grows_after_window
    shrunk: Callable[[float, float, float], float] = shrunk
    patience: bool = True
    refills: bool = True
    refills_on_every_clean_step: bool = False
    spends_when_shrinking: bool = False
    counts_overflows: bool = True
    remembers_overflows: bool = True


WINDOW = WindowPieces()


def update_dynamic(call: DynamicCall, f: WindowPieces = WINDOW) -> None:
    """The dynamic rule with hysteresis."""
    delayed, hysteresis = int(call.delayed_shift), int(call.cur_hysteresis)
    if float(call.found_inf) != 0.0:
        overflow(call, f, not f.patience or delayed == 1 or hysteresis == 1)
        return
    if (call.consecutive_hysteresis or f.refills_on_every_clean_step) and f.refills:
        call.cur_hysteresis.copy_(call.delayed_shift)
    if f.grows(int(call.cur_iter), int(call.last_overflow_iter), int(call.scale_window)):
        if f.refills:
            call.cur_hysteresis.copy_(call.delayed_shift)
        put_scale(call.scale, float(call.scale) * float(call.scale_factor))
    call.cur_iter.add_(1)


def overflow(call: DynamicCall, f: WindowPieces, shrinks: bool) -> None:
    """The overflow rows of the dynamic rule."""
    scale, floor = float(call.scale), float(call.min_scale)
    if shrinks and scale == floor and call.raise_error_at_min_scale:
        call.exhausted.fill_(1)
        return
    if shrinks:
        put_scale(call.scale, f.shrunk(scale, float(call.scale_factor), floor))
    if not shrinks or f.spends_when_shrinking:
        call.cur_hysteresis.sub_(1)
    if f.remembers_overflows:
        call.last_overflow_iter.copy_(call.cur_iter)
    if f.counts_overflows:
        call.cur_iter.add_(1)


def update_wrapper(call: WrapperCall, f: WindowPieces = WINDOW) -> None:
    """The wrappers' rule: the dynamic one without hysteresis and without an error at the floor."""
    scale, factor = float(call.scale), float(call.scale_factor)
    if float(call.found_inf) != 0.0:
        put_scale(call.scale, f.shrunk(scale, factor, float(call.min_scale)))
        if f.remembers_overflows:
            call.last_overflow_iter.copy_(call.cur_iter)
        if not f.counts_overflows:
            return
    elif f.grows(int(call.cur_iter), int(call.last_overflow_iter), int(call.scale_window)):
        put_scale(call.scale, scale * factor)
    call.cur_iter.add_(1)


def to_fp32(value: float) -> float:
    """The number rounded once to fp32."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


@dataclass(frozen=True, kw_only=True)
class TrackerPieces:
    """The decisions of torch's rule; the defaults are right."""

    rounded: Callable[[float], float] = to_fp32
    due: Callable[[int, int], bool] = lambda successes, interval: successes == interval
    accepts: Callable[[float], bool] = math.isfinite
    floor: float = 0.0
    resets_on_overflow: bool = True
    resets_on_growth: bool = True


TRACKER = TrackerPieces()


def update_torch(call: TorchScaleCall, f: TrackerPieces = TRACKER) -> None:
    """Torch's rule: back off on overflow, grow on the interval-th clean step in a row."""
    scale, successes = float(call.scale), int(call.growth_tracker) + 1
    if float(call.found_inf) != 0.0:
        put_scale(call.scale, max(f.rounded(scale * float(call.backoff_factor)), f.floor))
        if f.resets_on_overflow:
            call.growth_tracker.zero_()
        return
    if f.due(successes, int(call.growth_interval)):
        grown = f.rounded(scale * float(call.growth_factor))
        put_scale(call.scale, grown if f.accepts(grown) else scale)
        successes = 0 if f.resets_on_growth else successes
    call.growth_tracker.fill_(successes)
