"""Clip factors and loss-scale rules: operations on controls alone, one row each."""

from __future__ import annotations

import twinstep.reference.clip
import twinstep.reference.update_scale
from twinstep.parity.operations import arguments, combinations, controls
from twinstep.parity.operations.operation import Bound, Operation

CLIP_FACTOR = Operation(
    name="clip_factor",
    summary="Unscale and clip as one factor, from the norm of the scaled gradients.",
    equations=(
        "c = (norm / scale + 1e-6) / max_norm, in float64",
        "factor = fp32(1 / (scale c)) if max_norm > 0 and c > 1, otherwise fp32(1 / scale)",
    ),
    controls=(controls.NORM, controls.SCALE, controls.MAX_NORM, controls.FACTOR_OUT),
    writes=("factor",),
    reference=twinstep.reference.clip.clip_factor,
    combinations=combinations.SCALAR,
    laws=arguments.in_order(*arguments.FACTOR_LAWS, "power_of_two"),
    layouts=(),
)

CLIP_COEFFICIENT = Operation(
    name="clip_coefficient",
    summary="The clip coefficient of unscaled gradients.",
    equations=(
        "k = max_norm / (norm + 1e-6), in float64",
        "factor = fp32(k) if max_norm > 0 and k < 1, otherwise 1",
    ),
    controls=(controls.NORM, controls.MAX_NORM, controls.FACTOR_OUT),
    writes=("factor",),
    reference=twinstep.reference.clip.clip_coefficient,
    combinations=combinations.SCALAR,
    laws=arguments.FACTOR_LAWS,
    layouts=(),
)

UPDATE_SCALE_DYNAMIC = Operation(
    name="update_scale_dynamic",
    summary="Loss-scale rule with hysteresis.",
    equations=(
        "overflow: at the floor with raise_error_at_min_scale only exhausted = 1;",
        "  hysteresis used up: scale = max(scale / scale_factor, min_scale);",
        "  otherwise cur_hysteresis - 1",
        "  last_overflow_iter = cur_iter;  cur_iter + 1",
        "clean: q = cur_iter - last_overflow_iter - 1; if q > 0 and q mod scale_window = 0 the",
        "  scale grows by scale_factor and cur_hysteresis = delayed_shift;  cur_iter + 1",
    ),
    controls=(
        controls.SCALE,
        controls.CUR_ITER,
        controls.LAST_OVERFLOW,
        controls.HYSTERESIS,
        controls.EXHAUSTED,
        controls.FOUND,
        controls.SCALE_FACTOR,
        controls.SCALE_WINDOW,
        controls.MIN_SCALE,
        controls.DELAYED_SHIFT,
    ),
    options=(arguments.CONSECUTIVE, arguments.RAISE_AT_MIN),
    writes=("scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "exhausted"),
    reference=twinstep.reference.update_scale.update_scale_dynamic,
    combinations=combinations.SCALAR,
    laws=arguments.SCALER_LAWS,
    layouts=(),
    bound=Bound.EXACT,
)

UPDATE_SCALE_WRAPPER = Operation(
    name="update_scale_wrapper",
    summary="Loss-scale rule of the optimizer wrappers: no hysteresis, silent at the floor.",
    equations=(
        "overflow: scale = max(scale / scale_factor, min_scale);  last_overflow_iter = cur_iter",
        "clean: q = cur_iter - last_overflow_iter - 1; if q > 0 and q mod scale_window = 0 the",
        "  scale grows by scale_factor",
        "cur_iter + 1",
    ),
    controls=(
        controls.SCALE,
        controls.CUR_ITER,
        controls.LAST_OVERFLOW,
        controls.FOUND,
        controls.SCALE_FACTOR,
        controls.SCALE_WINDOW,
        controls.MIN_SCALE,
    ),
    writes=("scale", "cur_iter", "last_overflow_iter"),
    reference=twinstep.reference.update_scale.update_scale_wrapper,
    combinations=combinations.SCALAR,
    laws=arguments.SCALER_LAWS,
    layouts=(),
    bound=Bound.EXACT,
)

UPDATE_SCALE_TORCH = Operation(
    name="update_scale_torch",
    summary="Loss-scale rule of torch.amp.GradScaler.",
    equations=(
        "overflow: scale = fp32(scale backoff_factor);  growth_tracker = 0",
        "clean: growth_tracker + 1; at growth_interval scale = fp32(scale growth_factor), if that",
        "  is finite, and growth_tracker = 0",
    ),
    controls=(
        controls.TORCH_SCALE,
        controls.GROWTH_TRACKER,
        controls.FOUND,
        controls.GROWTH_FACTOR,
        controls.BACKOFF_FACTOR,
        controls.GROWTH_INTERVAL,
    ),
    writes=("scale", "growth_tracker"),
    reference=twinstep.reference.update_scale.update_scale_torch,
    combinations=combinations.SCALAR,
    laws=arguments.SCALER_LAWS,
    layouts=(),
    bound=Bound.EXACT,
)
