"""Adam (L2) and AdamW (decoupled), with an optional low-precision copy, in one pass.

The arithmetic of `fast.kernels.adam`. For fp32 state, a 16-bit gradient and a 16-bit copy it reads
2 + 4 + 4 + 4 and writes 4 + 4 + 4 + 2 bytes per parameter: 28.
"""

import ctypes
from collections.abc import Mapping, Sequence

from torch import Tensor

from twinstep.fast.runtime.checks import Lists, require_step
from twinstep.fast.runtime.native import NUMBERS, call, require_cpu

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "factor")


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """Adam with L2 weight decay; arguments and errors as in `fast.kernels.adam`, on the CPU."""
    controls = dict(zip(HYPER, (lr, beta1, beta2, eps, weight_decay, factor), strict=True))
    lists = named(params, grads, exp_avgs, exp_avg_sqs, copies)
    _step("adam_step_", lists, steps, controls, found_inf, bias_correction, decoupled=False)


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """AdamW: the decay acts on the weights alone. Arguments and errors as in `adam_step_`."""
    controls = dict(zip(HYPER, (lr, beta1, beta2, eps, weight_decay, factor), strict=True))
    lists = named(params, grads, exp_avgs, exp_avg_sqs, copies)
    _step("adamw_step_", lists, steps, controls, found_inf, bias_correction, decoupled=True)


def named(*lists: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    """Lists of an update by name: params, grads, exp_avgs, exp_avg_sqs, copies."""
    return dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs", "copies"), lists, strict=True))


def _step(
    where: str,
    lists: Lists,
    steps: Sequence[Tensor],
    controls: Mapping[str, Tensor],
    found_inf: Tensor,
    bias_correction: bool,
    *,
    decoupled: bool,
) -> None:
    require_step(where, lists, steps, {**controls, "found_inf": found_inf})
    require_cpu(where, found_inf)
    if found_inf.item() == 0.0:
        hyper = [value.item() for value in controls.values()]
        update_adam(lists, steps, hyper, bias_correction=bias_correction, decoupled=decoupled)


def update_adam(
    lists: Lists,
    steps: Sequence[Tensor],
    hyper: Sequence[float],
    *,
    bias_correction: bool,
    decoupled: bool,
    as_sums: bool = False,
) -> None:
    """Advance the counters and update every tensor.

    Args:
        lists: by the names in `named`; contiguous, on the CPU; `copies` may be empty.
        steps: completed steps.
        hyper: in the order of HYPER.
        bias_correction: False uses 1 for both corrections.
        decoupled: AdamW, not Adam.
        as_sums: take gradients for sums that began at 0.0, which are never -0.0.
    """
    *required, copies = lists.values()
    lows: Sequence[Tensor | None] = copies or [None] * len(steps)
    rows = (
        (
            *(tensor.data_ptr() for tensor in (p, g, m, v)),
            0 if low is None else low.data_ptr(),
            *(step.data_ptr(), p.numel(), NUMBERS[p.dtype], NUMBERS[g.dtype]),
            0 if low is None else NUMBERS[low.dtype],
        )
        for p, g, m, v, low, step in zip(*required, lows, steps, strict=True)
    )
    numbers = (ctypes.c_double * len(HYPER))(*hyper)
    flags = map(ctypes.c_int64, (decoupled, bias_correction, as_sums))
    call("twinstep_adam", rows, numbers, *flags)
