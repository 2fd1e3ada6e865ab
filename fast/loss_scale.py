"""The loss-scale rules over 0-dim tensors, in place and on the device.

With I = cur_iter, L = last_overflow_iter, q = I - L - 1:

    dynamic   overflow: spend one of the hysteresis, or max(scale / factor, min_scale) once it is
              spent; clean with q > 0 and q mod window = 0: scale * factor
    wrapper   the same without hysteresis
    torch     overflow: scale * backoff; clean step number interval in a row: scale * growth,
              unless that is infinite in fp32

Scales, factors and floors are float64, counters int64, found_inf is fp32; all have shape ().
"""

from torch import Tensor

from twinstep.fast.checks import require_controls
from twinstep.fast.kernels import loss_scale as kernels


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
    kernels.update_scale_dynamic_(
        **state,
        **constants,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=raise_error_at_min_scale,
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
    kernels.update_scale_wrapper_(**controls)


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
    kernels.update_scale_torch_(**controls)
