"""The loss-scale rules as one-program kernels over 0-dim tensors.

With I = cur_iter, L = last_overflow_iter, q = I - L - 1:

    dynamic   overflow: spend one of the hysteresis, or max(scale / factor, min_scale) once it is
              spent; clean with q > 0 and q mod window = 0: scale * factor
    wrapper   the same without hysteresis
    torch     overflow: scale * backoff; clean step number interval in a row: scale * growth,
              unless that is infinite in fp32

Scales, factors and floors are float64, counters int64, found_inf is fp32; all have shape ().

Versions, and what each costs: one. The rules themselves are device functions, shared with the
finalise kernel of a whole step, which runs them without a launch of its own. No rule reads or
writes more than its own few words, and none needs the host.
"""

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.runtime.checks import require_controls
from twinstep.fast.runtime.dispatch import launch


@triton.jit
def grows_now(cur_iter, last_overflow_iter, window, GROW_ON_WINDOW: tl.constexpr):
    """Say whether a full window of clean steps lies between the last overflow and this step.

    GROW_ON_WINDOW counts this step as well (DeepSpeed 0.14).
    """
    clean = cur_iter - last_overflow_iter - 1
    return (clean + 1) % window == 0 if GROW_ON_WINDOW else (clean > 0) & (clean % window == 0)


@triton.jit
def shrunk(scale, factor, floor):
    """Return scale / factor, or the floor where that is above it (NaN is not below)."""
    lower = scale / factor
    return tl.where(floor > lower, floor, lower)


@triton.jit
def dynamic_rule(
    scale,
    cur_iter,
    last,
    hysteresis,
    exhausted,
    overflow,
    factor,
    window,
    floor,
    shift,
    CONSECUTIVE: tl.constexpr,
    RAISE: tl.constexpr,
    GROW_ON_WINDOW: tl.constexpr,
):
    """Return (scale, cur_iter, last, hysteresis, exhausted) after one step."""
    spent = (shift == 1) | (hysteresis == 1)
    shrinks = overflow & spent
    grows = (~overflow) & grows_now(cur_iter, last, window, GROW_ON_WINDOW)
    refills = grows
    if CONSECUTIVE:
        refills = ~overflow
    new_scale = tl.where(shrinks, shrunk(scale, factor, floor), scale)
    new_scale = tl.where(grows, scale * factor, new_scale)
    new_hysteresis = tl.where(overflow & (~spent), hysteresis - 1, hysteresis)
    new_hysteresis = tl.where(refills, shift, new_hysteresis)
    new_last = tl.where(overflow, cur_iter, last)
    new_iter = cur_iter + 1
    if RAISE:
        # Stuck at the floor: the host is to raise, and nothing moves until it does.
        stuck = shrinks & (scale == floor)
        exhausted = tl.where(stuck, 1, exhausted)
        new_scale = tl.where(stuck, scale, new_scale)
        new_iter = tl.where(stuck, cur_iter, new_iter)
        new_last = tl.where(stuck, last, new_last)
    return new_scale, new_iter, new_last, new_hysteresis, exhausted


@triton.jit
def wrapper_rule(scale, cur_iter, last, overflow, factor, window, floor):
    """Return (scale, cur_iter, last) after one step."""
    grows = (~overflow) & grows_now(cur_iter, last, window, False)
    new_scale = tl.where(overflow, shrunk(scale, factor, floor), scale)
    new_scale = tl.where(grows, scale * factor, new_scale)
    return new_scale, cur_iter + 1, tl.where(overflow, cur_iter, last)


@triton.jit
def torch_rule(scale, tracker, overflow, growth, backoff, interval):
    """Return (scale, tracker) after one step; a changed scale is rounded to fp32."""
    clean = tracker + 1
    due = (~overflow) & (clean == interval)
    grown = (scale * growth).to(tl.float32)
    # An infinite scale would never come back: growth stops where fp32 ends.
    grows = due & (tl.abs(grown) < float("inf"))
    new_scale = tl.where(overflow, (scale * backoff).to(tl.float32).to(tl.float64), scale)
    new_scale = tl.where(grows, grown.to(tl.float64), new_scale)
    return new_scale, tl.where(overflow | due, 0, clean)


DYNAMIC = ("scale", "cur_iter", "last", "hysteresis", "exhausted", "found_inf")
CONSTANTS = ("factor", "window", "floor", "shift")


@triton.jit(do_not_specialize_on_alignment=[*DYNAMIC, *CONSTANTS])
def dynamic_kernel(
    scale,
    cur_iter,
    last,
    hysteresis,
    exhausted,
    found_inf,
    factor,
    window,
    floor,
    shift,
    CONSECUTIVE: tl.constexpr,
    RAISE: tl.constexpr,
):
    """One update of the dynamic rule."""
    new_scale, new_iter, new_last, new_hysteresis, new_exhausted = dynamic_rule(
        tl.load(scale),
        tl.load(cur_iter),
        tl.load(last),
        tl.load(hysteresis),
        tl.load(exhausted),
        tl.load(found_inf) != 0.0,
        tl.load(factor),
        tl.load(window),
        tl.load(floor),
        tl.load(shift),
        CONSECUTIVE,
        RAISE,
        False,
    )
    # Every thread reads, one thread writes: no write may overtake a read.
    tl.debug_barrier()
    tl.store(scale, new_scale)
    tl.store(cur_iter, new_iter)
    tl.store(last, new_last)
    tl.store(hysteresis, new_hysteresis)
    tl.store(exhausted, new_exhausted)


@triton.jit(do_not_specialize_on_alignment=[*DYNAMIC[:3], "found_inf", *CONSTANTS[:3]])
def wrapper_kernel(scale, cur_iter, last, found_inf, factor, window, floor):
    """One update of the wrapper rule."""
    new_scale, new_iter, new_last = wrapper_rule(
        tl.load(scale),
        tl.load(cur_iter),
        tl.load(last),
        tl.load(found_inf) != 0.0,
        tl.load(factor),
        tl.load(window),
        tl.load(floor),
    )
    tl.debug_barrier()
    tl.store(scale, new_scale)
    tl.store(cur_iter, new_iter)
    tl.store(last, new_last)


@triton.jit(
    do_not_specialize_on_alignment=[
        "scale",
        "tracker",
        "found_inf",
        "growth",
        "backoff",
        "interval",
    ]
)
def torch_kernel(scale, tracker, found_inf, growth, backoff, interval):
    """One update of torch's rule."""
    new_scale, new_tracker = torch_rule(
        tl.load(scale),
        tl.load(tracker),
        tl.load(found_inf) != 0.0,
        tl.load(growth),
        tl.load(backoff),
        tl.load(interval),
    )
    tl.debug_barrier()
    tl.store(scale, new_scale)
    tl.store(tracker, new_tracker)


def update_scale_dynamic_(
    *,
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    cur_hysteresis: Tensor,
    exhausted: Tensor,
    found_inf: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
    delayed_shift: Tensor,
    consecutive_hysteresis: bool,
    raise_error_at_min_scale: bool,
) -> None:
    """One transition of the dynamic rule.

    Args:
        scale: the loss scale; written.
        cur_iter: steps seen; written.
        last_overflow_iter: cur_iter of the last overflow, or -1; written.
        cur_hysteresis: overflows left before the scale shrinks; written.
        exhausted: set to 1 by an overflow that needs a smaller scale than the floor, with
            nothing else written; never cleared here.
        found_inf: not 0 means overflow.
        scale_factor: what the scale grows and shrinks by.
        scale_window: clean steps between growths, at least 1.
        min_scale: floor of shrinking.
        delayed_shift: full hysteresis.
        consecutive_hysteresis: refill the hysteresis on every clean step, not only on growth.
        raise_error_at_min_scale: False stays at the floor silently.
    """
    state = {"scale": scale, "cur_iter": cur_iter, "last_overflow_iter": last_overflow_iter}
    state |= {"cur_hysteresis": cur_hysteresis, "exhausted": exhausted, "found_inf": found_inf}
    constants = {"scale_factor": scale_factor, "scale_window": scale_window}
    constants |= {"min_scale": min_scale, "delayed_shift": delayed_shift}
    require_controls("update_scale_dynamic_", scale, state | constants)
    launch(
        dynamic_kernel,
        1,
        scale,
        (*state.values(), *constants.values()),
        warps=1,
        CONSECUTIVE=consecutive_hysteresis,
        RAISE=raise_error_at_min_scale,
    )


def update_scale_wrapper_(
    *,
    scale: Tensor,
    cur_iter: Tensor,
    last_overflow_iter: Tensor,
    found_inf: Tensor,
    scale_factor: Tensor,
    scale_window: Tensor,
    min_scale: Tensor,
) -> None:
    """One transition of the wrapper rule; arguments as in `update_scale_dynamic_`."""
    controls = {"scale": scale, "cur_iter": cur_iter, "last_overflow_iter": last_overflow_iter}
    controls |= {"found_inf": found_inf, "scale_factor": scale_factor}
    controls |= {"scale_window": scale_window, "min_scale": min_scale}
    require_controls("update_scale_wrapper_", scale, controls)
    launch(wrapper_kernel, 1, scale, tuple(controls.values()), warps=1)


def update_scale_torch_(
    *,
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: Tensor,
    backoff_factor: Tensor,
    growth_interval: Tensor,
) -> None:
    """One transition of torch's rule; a changed scale is rounded to fp32.

    Args:
        scale: the loss scale; written.
        growth_tracker: clean steps in a row; written.
        found_inf: not 0 means overflow.
        growth_factor: what the scale grows by.
        backoff_factor: what an overflow multiplies the scale by.
        growth_interval: clean steps in a row between growths.
    """
    controls = {"scale": scale, "growth_tracker": growth_tracker, "found_inf": found_inf}
    controls |= {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    controls |= {"growth_interval": growth_interval}
    require_controls("update_scale_torch_", scale, controls)
    launch(torch_kernel, 1, scale, tuple(controls.values()), warps=1)
