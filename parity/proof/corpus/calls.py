"""One record per operation that holds the arguments of one call.

The fields of a record are the operation's signature: positional lists first, controls and options
keyword-only after them. `kernel_from` turns a function of one record into a kernel with exactly
that signature, so that a wrong kernel can be one readable line on a record:

    step(replace(call, beta1=call.beta2))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from torch import Tensor

Kernel = Callable[..., None]
Tensors = list[Tensor]


@dataclass(frozen=True)
class Moments:
    """Arguments of all steps with two moments."""

    params: Tensors
    grads: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    copies: Tensors
    steps: Tensors
    _: KW_ONLY
    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor


@dataclass(frozen=True)
class AdamCall(Moments):
    """`adam_step` and `adamw_step`; writes params, exp_avgs, exp_avg_sqs, copies, steps."""

    _: KW_ONLY
    factor: Tensor
    found_inf: Tensor
    bias_correction: bool


@dataclass(frozen=True)
class LambCall(Moments):
    """`lamb_step`; writes params, exp_avgs, exp_avg_sqs, copies, steps."""

    _: KW_ONLY
    max_coeff: Tensor
    min_coeff: Tensor
    factor: Tensor
    found_inf: Tensor
    bias_correction: bool
    eps_inside_sqrt: bool


@dataclass(frozen=True)
class ApexLambCall(Moments):
    """`apex_lamb_step`; writes params, exp_avgs, exp_avg_sqs, copies, steps."""

    _: KW_ONLY
    max_norm: Tensor
    norm: Tensor
    factor: Tensor
    found_inf: Tensor
    bias_correction: bool
    adam_w_mode: bool
    grad_averaging: bool
    use_nvlamb: bool


@dataclass(frozen=True)
class SgdCall:
    """`sgd_step`; writes params, momentums, copies, steps."""

    params: Tensors
    grads: Tensors
    momentums: Tensors
    copies: Tensors
    steps: Tensors
    _: KW_ONLY
    lr: Tensor
    momentum: Tensor
    dampening: Tensor
    weight_decay: Tensor
    factor: Tensor
    found_inf: Tensor
    nesterov: bool


@dataclass(frozen=True)
class UnscaleCall:
    """`unscale`; writes grads, found_inf."""

    grads: Tensors
    _: KW_ONLY
    inv_scale: Tensor
    found_inf: Tensor


@dataclass(frozen=True)
class GlobalNormCall:
    """`global_norm`; writes norm, found_inf."""

    grads: Tensors
    _: KW_ONLY
    norm: Tensor
    found_inf: Tensor


@dataclass(frozen=True)
class ClipFactorCall:
    """`clip_factor`; writes factor."""

    _: KW_ONLY
    norm: Tensor
    scale: Tensor
    max_norm: Tensor
    factor: Tensor


@dataclass(frozen=True)
class ClipCoefficientCall:
    """`clip_coefficient`; writes factor."""

    _: KW_ONLY
    norm: Tensor
    max_norm: Tensor
    factor: Tensor


@dataclass(frozen=True)
class DynamicCall:
    """`update_scale_dynamic`; writes scale, both counters, cur_hysteresis, exhausted."""

    _: KW_ONLY
    scale: Tensor
    cur_iter: Tensor
    last_overflow_iter: Tensor
    cur_hysteresis: Tensor
    exhausted: Tensor
    found_inf: Tensor
    scale_factor: Tensor
    scale_window: Tensor
    min_scale: Tensor
    delayed_shift: Tensor
    consecutive_hysteresis: bool
    raise_error_at_min_scale: bool


@dataclass(frozen=True)
class WrapperCall:
    """`update_scale_wrapper`; writes scale, cur_iter, last_overflow_iter."""

    _: KW_ONLY
    scale: Tensor
    cur_iter: Tensor
    last_overflow_iter: Tensor
    found_inf: Tensor
    scale_factor: Tensor
    scale_window: Tensor
    min_scale: Tensor


@dataclass(frozen=True)
class TorchScaleCall:
    """`update_scale_torch`; writes scale, growth_tracker."""

    _: KW_ONLY
    scale: Tensor
    growth_tracker: Tensor
    found_inf: Tensor
    growth_factor: Tensor
    backoff_factor: Tensor
    growth_interval: Tensor


@dataclass(frozen=True)
class FlattenCall:
    """`flatten`; writes flat (a list of one)."""

    tensors: Tensors
    flat: Tensors
    _: KW_ONLY
    slot: int


@dataclass(frozen=True)
class UnflattenCall:
    """`unflatten`; writes tensors."""

    flat: Tensors
    tensors: Tensors
    _: KW_ONLY
    slot: int


@dataclass(frozen=True)
class AccumulateCall:
    """`accumulate`; writes accumulators."""

    accumulators: Tensors
    grads: Tensors


@dataclass(frozen=True)
class CastCopyCall:
    """`cast_copy`; writes copies."""

    sources: Tensors
    copies: Tensors


@dataclass(frozen=True)
class MixedCall(Moments):
    """`mixed_step`; writes everything except grads and the constants of the loss-scale rule."""

    _: KW_ONLY
    max_norm: Tensor
    scale: Tensor
    cur_iter: Tensor
    last_overflow_iter: Tensor
    cur_hysteresis: Tensor
    growth_tracker: Tensor
    exhausted: Tensor
    scale_factor: Tensor
    scale_window: Tensor
    min_scale: Tensor
    delayed_shift: Tensor
    backoff_factor: Tensor
    norm: Tensor
    found_inf: Tensor
    adam_w_mode: bool
    bias_correction: bool
    rule: str
    consecutive_hysteresis: bool
    raise_error_at_min_scale: bool


Call = TypeVar("Call")


def part(record: type[Call], call: object, **given: Tensor) -> Call:
    """The call of one operation out of a larger one; `given` adds or replaces arguments."""
    held = {**vars(call), **given}
    return record(**{name: held[name] for name in inspect.signature(record).parameters})


def skipped(call: AdamCall | LambCall | ApexLambCall | SgdCall) -> bool:
    """True if this step must leave everything unchanged."""
    return float(call.found_inf) != 0.0


def kernel_from(record: type[Call], run: Callable[[Call], None], name: str) -> Kernel:
    """A kernel named `name` whose signature is the fields of `record` and whose body is `run`."""

    def kernel(*lists: Tensors, **controls: object) -> None:
        run(record(*lists, **controls))

    # The signature comes from the record; name, place and sentence come from the body.
    dressed = functools.wraps(run)(kernel)
    setattr(dressed, "__signature__", inspect.signature(record))  # noqa: B010 - not a typed field
    dressed.__name__ = dressed.__qualname__ = name
    return dressed
