"""The one program between reducing the gradients and updating the weights of a mixed step.

Versions, and what each costs: one; about 300 bytes, 16 for each tensor, and the latency of one
launch. It turns limbs into the norm, decides whether the step is skipped, forms the factor that
unscales and clips, runs the loss-scale rule, advances the step counters and forms the bias
corrections, and leaves the limbs at zero for the next step. The host learns nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from twinstep.fast.kernels._arith import LANES, advance_adam_steps, store_adam_header
from twinstep.fast.kernels._lamb import advance_lamb_steps, store_lamb_header
from twinstep.fast.kernels._limbs import (
    INFINITY,
    NONFINITE,
    PADDED,
    PAST_SQUARES,
    largest_of,
    norm_of,
    sum_of,
    told_by_ranks,
)
from twinstep.fast.kernels.clip import unscale_and_clip
from twinstep.fast.kernels.loss_scale import dynamic_rule, torch_rule, wrapper_rule
from twinstep.fast.runtime.dispatch import launch
from twinstep.fast.runtime.tables import SHARED, TableCache, address_table

CONTROLS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "max_norm",
    "scale",
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
    "growth_tracker",
    "exhausted",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "backoff_factor",
    "norm",
    "found_inf",
)
FURTHER = ("external", "max_coeff", "min_coeff")  # read only where a constant says so


@triton.jit
def norm_of_kind(
    limbs, norm, NORM_1: tl.constexpr, NORM_MAX: tl.constexpr, NORM_GIVEN: tl.constexpr
):
    """Return (norm, found_inf) of the scaled gradients as fp32."""
    if NORM_MAX:
        value = largest_of(limbs)
        found = (value.to(tl.int32, bitcast=True) >= INFINITY).to(tl.float32)
    elif NORM_1:
        # A sum that leaves fp32 is infinite, and is no overflow of a gradient.
        value = sum_of(limbs)
        found = (tl.load(limbs + NONFINITE) != 0).to(tl.float32)
    else:
        value, found = norm_of(limbs)
        if NORM_GIVEN:
            value = tl.load(norm)
    return value, found


@triton.jit(
    do_not_specialize=["tensors"],
    do_not_specialize_on_alignment=["limbs", "steps", "coefficients", *CONTROLS, *FURTHER],
)
def finalise_kernel(
    limbs,
    steps,
    coefficients,
    tensors: tl.int64,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    max_norm,
    scale,
    cur_iter,
    last_overflow_iter,
    cur_hysteresis,
    growth_tracker,
    exhausted,
    scale_factor,
    scale_window,
    min_scale,
    delayed_shift,
    backoff_factor,
    norm,
    found_inf,
    external,
    max_coeff,
    min_coeff,
    BIAS_CORRECTION: tl.constexpr,
    IS_TABLE: tl.constexpr,
    RULE: tl.constexpr,
    CONSECUTIVE: tl.constexpr,
    RAISE: tl.constexpr,
    GROW_ON_WINDOW: tl.constexpr,
    UNSCALE_WITH_NEW: tl.constexpr,
    EXTERNAL: tl.constexpr,
    NORM_1: tl.constexpr,
    NORM_MAX: tl.constexpr,
    NORM_GIVEN: tl.constexpr,
    NORM_SCALED: tl.constexpr,
    LAMB: tl.constexpr,
    RANKS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """One program; every thread computes every scalar, one thread stores it."""
    scaled_norm, found = norm_of_kind(limbs, norm, NORM_1, NORM_MAX, NORM_GIVEN)
    if BOUNDED:
        # Second moments would be infinite for good: an overflow, though each gradient is finite.
        past = (scaled_norm.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= PAST_SQUARES
        found = tl.where(past, 1.0, found)
    moves = None  # all steps
    if RANKS:
        told = told_by_ranks(limbs, NORM_MAX)
        moves = told == 0
        found = tl.where(moves, found, 1.0)
        scaled_norm = tl.where(moves, scaled_norm, float("nan"))
    s = tl.load(scale)
    b1 = tl.load(beta1)
    b2 = tl.load(beta2)
    overflow = found != 0.0
    new_scale = s
    if RULE == "dynamic":
        new_scale, new_iter, new_last, new_hysteresis, new_exhausted = dynamic_rule(
            s,
            tl.load(cur_iter),
            tl.load(last_overflow_iter),
            tl.load(cur_hysteresis),
            tl.load(exhausted),
            overflow,
            tl.load(scale_factor),
            tl.load(scale_window),
            tl.load(min_scale),
            tl.load(delayed_shift),
            CONSECUTIVE,
            RAISE,
            GROW_ON_WINDOW,
        )
    elif RULE == "wrapper":
        new_scale, new_iter, new_last = wrapper_rule(
            s,
            tl.load(cur_iter),
            tl.load(last_overflow_iter),
            overflow,
            tl.load(scale_factor),
            tl.load(scale_window),
            tl.load(min_scale),
        )
    elif RULE == "torch":
        new_scale, new_tracker = torch_rule(
            s,
            tl.load(growth_tracker),
            overflow,
            tl.load(scale_factor),
            tl.load(backoff_factor),
            tl.load(scale_window),
        )
    # The gradients carry the scale that they were made with, not the next one.
    applied = s
    if UNSCALE_WITH_NEW:
        applied = new_scale
    if EXTERNAL:
        applied = tl.load(external)
    factor = unscale_and_clip(scaled_norm, applied, tl.load(max_norm))
    wd = tl.load(weight_decay)
    rate = tl.load(lr)
    if LAMB:
        bounds = (tl.load(max_coeff), tl.load(min_coeff))
        store_lamb_header(coefficients, b1, b2, tl.load(eps), wd, bounds, factor, found)
    else:
        store_adam_header(coefficients, rate, b1, b2, tl.load(eps), wd, factor, found)
    # Every thread reads limbs and state, one thread writes: no write may overtake a read.
    tl.debug_barrier()
    tl.store(limbs + tl.arange(0, PADDED), tl.zeros([PADDED], tl.int64))
    if NORM_SCALED:
        tl.store(norm, scaled_norm)
    else:
        tl.store(norm, (scaled_norm.to(tl.float64) / applied).to(tl.float32))
    tl.store(found_inf, found)
    if RULE != "static":
        tl.store(scale, new_scale, mask=moves)
    if RULE == "dynamic" or RULE == "wrapper":
        tl.store(cur_iter, new_iter, mask=moves)
        tl.store(last_overflow_iter, new_last, mask=moves)
    if RULE == "dynamic":
        tl.store(cur_hysteresis, new_hysteresis, mask=moves)
        tl.store(exhausted, new_exhausted, mask=moves)
    if RULE == "torch":
        tl.store(growth_tracker, new_tracker, mask=moves)
    if RANKS:
        tl.store(exhausted, told, mask=told != 0)
    first = tl.zeros([], tl.int64)
    while first < tensors:
        if LAMB:
            advance_lamb_steps(
                steps, coefficients, first, tensors, rate, b1, b2, found, BIAS_CORRECTION, IS_TABLE
            )
        else:
            advance_adam_steps(
                steps, coefficients, first, tensors, b1, b2, found, BIAS_CORRECTION, IS_TABLE
            )
        first += LANES


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Choices of a whole step that never change.

    Attributes:
        rule: that moves the loss scale.
        bias_correction: of the moments.
        consecutive_hysteresis: of the dynamic rule.
        raise_error_at_min_scale: of the dynamic rule.
        growth_counts_this_step: as in `contract.compat.Compat`, like the next.
        unscale_with_updated_scale: see there.
        norm_kind: "2", "1", "inf", or "given" where the norm of the scaled gradients stands in
            `norm` already; the limbs then hold squares.
        reports_scaled_norm: leave the norm of the scaled gradients there, not the unscaled one.
        over_ranks: the limbs hold what ranks have told each other. A step that one of them refuses,
            or has another scale for, is skipped, and moves nothing but `exhausted`.
        bounded: gradients whose squares are past fp32 overflow, too; for norms "2", "1", "inf".
    """

    rule: str
    bias_correction: bool = True
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = False
    growth_counts_this_step: bool = False
    unscale_with_updated_scale: bool = False
    norm_kind: str = "2"
    reports_scaled_norm: bool = False
    over_ranks: bool = False
    bounded: bool = False


def finalise(
    limbs: Tensor,
    steps: Sequence[Tensor],
    coefficients: Tensor,
    controls: Sequence[Tensor],
    finish: Finish,
    cache: TableCache = SHARED,
    *,
    external: Tensor | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Run the program between reduce and update; `controls` are in the order of CONTROLS.

    `external`: the scale that the gradients were made with, where it is not the rule's (float64,
    shape ()). `bounds`: of LAMB's trust ratio, largest and smallest; the coefficients are then
    LAMB's.
    """
    is_table = len(steps) > 1
    # Without tensors there is no counter to point at, and none is touched: any int64 will do.
    counters = address_table(steps, cache).data if is_table else (*steps, limbs)[0]
    scale = controls[CONTROLS.index("scale")]
    further = (scale if external is None else external, *(bounds or (scale, scale)))
    launch(
        finalise_kernel,
        1,
        limbs,
        (limbs, counters, coefficients, len(steps), *controls, *further),
        reaches=[steps],
        BIAS_CORRECTION=finish.bias_correction,
        IS_TABLE=is_table,
        RULE=finish.rule,
        CONSECUTIVE=finish.consecutive_hysteresis,
        RAISE=finish.raise_error_at_min_scale,
        GROW_ON_WINDOW=finish.growth_counts_this_step,
        UNSCALE_WITH_NEW=finish.unscale_with_updated_scale,
        EXTERNAL=external is not None,
        NORM_1=finish.norm_kind == "1",
        NORM_MAX=finish.norm_kind == "inf",
        NORM_GIVEN=finish.norm_kind == "given",
        NORM_SCALED=finish.reports_scaled_norm,
        LAMB=bounds is not None,
        RANKS=finish.over_ranks,
        BOUNDED=finish.bounded and finish.norm_kind != "given",
    )
