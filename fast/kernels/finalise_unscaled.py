"""The one program between reducing unscaled gradients and updating one group's weights.

Versions, and what each costs: one; about 300 bytes and the latency of one launch for each group.
It turns limbs into the norm, skips the step where its square is no fp32 number, forms the factor
that clips, advances the group's step counter and forms its bias corrections. Every group's program
reads the same limbs; the last one leaves them at zero for the next step.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import advance_adam_steps, store_adam_header
from twinstep.fast.kernels._limbs import PADDED, PAST_SQUARES, largest_of, norm_of, sum_of
from twinstep.fast.kernels.clip import EPSILON
from twinstep.fast.runtime.dispatch import launch

CONTROLS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "max_norm",
    "norm",
    "found_inf",
    "factor",
)


@triton.jit(do_not_specialize_on_alignment=["limbs", "step", "coefficients", *CONTROLS])
def finalise_unscaled_kernel(
    limbs,
    step,
    coefficients,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    max_norm,
    norm,
    found_inf,
    factor,
    KIND: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
    AHEAD: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program. AHEAD: gradients are clipped by a launch of its own, before the update."""
    if KIND == "2":
        value, _ = norm_of(limbs)
    elif KIND == "1":
        value = sum_of(limbs)
    else:
        value = largest_of(limbs)
    # Squares of finite gradients may be past fp32: that skips the step, too.
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    skip = (magnitude >= PAST_SQUARES).to(tl.float32)
    largest = tl.load(max_norm)
    k = largest / (value.to(tl.float64) + EPSILON)
    clips = (largest > 0.0) & (k < 1.0)
    clip = tl.where(clips, k, 1.0).to(tl.float32)
    b1 = tl.load(beta1)
    b2 = tl.load(beta2)
    applied = clip
    if AHEAD:
        applied = tl.full([], 1.0, tl.float32)
    wd = tl.load(weight_decay)
    store_adam_header(coefficients, tl.load(lr), b1, b2, tl.load(eps), wd, applied, skip)
    # Every thread reads the limbs, one thread writes: no write may overtake a read.
    tl.debug_barrier()
    if LAST:
        tl.store(limbs + tl.arange(0, PADDED), tl.zeros([PADDED], tl.int64))
    tl.store(norm, value)
    tl.store(found_inf, skip)
    tl.store(factor, clip)
    advance_adam_steps(step, coefficients, 0, 1, b1, b2, skip, BIAS_CORRECTION, False)


def finalise_unscaled(
    limbs: Tensor,
    step: Tensor,
    coefficients: Tensor,
    controls: Sequence[Tensor],
    *,
    kind: str,
    bias_correction: bool,
    ahead: bool,
    last: bool,
) -> None:
    """Run the program of one group; `controls` are in the order of CONTROLS.

    Args:
        limbs: of the gradients of all groups; cleared if `last`.
        step: the group's counter.
        coefficients: of the group's update; written.
        controls: norm, found_inf and factor are written.
        kind: of the norm, "2", "1" or "inf".
        bias_correction: of the group.
        ahead: the update must not clip.
        last: no other group follows.
    """
    launch(
        finalise_unscaled_kernel,
        1,
        limbs,
        (limbs, step, coefficients, *controls),
        KIND=kind,
        BIAS_CORRECTION=bias_correction,
        AHEAD=ahead,
        LAST=last,
    )
