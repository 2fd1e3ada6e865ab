"""Others that step from a state: the fast side's finalise kernel, DeepSpeed's and torch's classes.

Each gives the state after a step, or a word for the error it raised in place of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from twinstep.fast.kernels.finalise import Finish
from twinstep.fast.runtime.control import SLOTS
from twinstep.parity.proof.model_check.explore import Configuration
from twinstep.parity.proof.model_check.many import finalise_many
from twinstep.parity.proof.peers.installed import deepspeed
from twinstep.reference.loss_scale import DynamicRule, ScaleState, TorchRule, WrapperRule

Asked = tuple[ScaleState, bool]
Answer = ScaleState | str
BATCH = 16384
WHOLE = ("cur_iter", "last_overflow_iter", "cur_hysteresis", "growth_tracker", "exhausted")


def by_finalise(
    configuration: Configuration, asked: Sequence[Asked], nan: bool = False
) -> Iterator[Answer]:
    """Step by the finalise kernel, a batch of states in each launch.

    Args:
        configuration: the rule and its constants.
        asked: states and events.
        nan: an overflow is a NaN, not an infinity.
    """
    rule = configuration.rule
    # A static scale is a wrapper rule that multiplies and divides by 1, as the scaler class has it.
    finish = Finish(
        rule="wrapper" if configuration.kind == "static" else configuration.kind,
        consecutive_hysteresis=bool(getattr(rule, "consecutive_hysteresis", False)),
        raise_error_at_min_scale=bool(getattr(rule, "raise_error_at_min_scale", False)),
        growth_counts_this_step=bool(getattr(rule, "growth_counts_this_step", False)),
    )
    rest = iter(asked)
    while batch := list(islice(rest, BATCH)):
        blocks = np.zeros((len(batch), len(SLOTS)), dtype=np.int64)
        reals = blocks.view(np.float64)
        for name, value in _constants(configuration).items():
            column = blocks if isinstance(value, int) else reals
            column[:, SLOTS[name]] = value
        reals[:, SLOTS["scale"]] = [state.scale for state, _ in batch]
        for name in WHOLE:
            blocks[:, SLOTS[name]] = [getattr(state, name) for state, _ in batch]
        overflows = torch.tensor([overflow for _, overflow in batch])
        finalise_many(torch.from_numpy(blocks), overflows, finish, nan=nan)
        columns = [blocks[:, SLOTS[name]].tolist() for name in WHOLE]
        scales = reals[:, SLOTS["scale"]].tolist()
        for scale, *counters in zip(scales, *columns, strict=True):
            yield ScaleState(scale=scale, **dict(zip(WHOLE, counters, strict=True)))


def _constants(configuration: Configuration) -> dict[str, float]:
    rule = configuration.rule
    if isinstance(rule, TorchRule):
        return {
            "scale_factor": rule.growth_factor,
            "backoff_factor": rule.backoff_factor,
            "scale_window": rule.growth_interval,
        }
    if isinstance(rule, DynamicRule | WrapperRule):
        found: dict[str, float] = {
            "scale_factor": rule.scale_factor,
            "scale_window": rule.scale_window,
            "min_scale": rule.min_scale,
        }
        shift = {"delayed_shift": rule.delayed_shift} if isinstance(rule, DynamicRule) else {}
        return {**found, **shift}
    return {"scale_factor": 1.0, "scale_window": 1000, "min_scale": 0.0}


def by_deepspeed(configuration: Configuration, asked: Sequence[Asked]) -> Iterator[Answer]:
    """Step by DeepSpeed's `DynamicLossScaler`, or by the rule of its FP16_Optimizer."""
    rule = configuration.rule
    if isinstance(rule, DynamicRule):
        return _by_scaler(rule, asked)
    return _by_wrapper(cast(WrapperRule, rule), asked, "fused_optimizer", "FP16_Optimizer")


def by_unfused(configuration: Configuration, asked: Sequence[Asked]) -> Iterator[Answer]:
    """Step by the rule of DeepSpeed's FP16_UnfusedOptimizer."""
    rule = cast(WrapperRule, configuration.rule)
    return _by_wrapper(rule, asked, "unfused_optimizer", "FP16_UnfusedOptimizer")


def _by_scaler(rule: DynamicRule, asked: Sequence[Asked]) -> Iterator[Answer]:
    scaler = deepspeed("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(
        init_scale=1.0,
        scale_window=rule.scale_window,
        min_scale=rule.min_scale,
        delayed_shift=rule.delayed_shift,
        consecutive_hysteresis=rule.consecutive_hysteresis,
        raise_error_at_min_scale=rule.raise_error_at_min_scale,
    )
    for state, overflow in asked:
        scaler.cur_scale = state.scale
        scaler.cur_iter = state.cur_iter
        scaler.last_overflow_iter = state.last_overflow_iter
        scaler.cur_hysteresis = state.cur_hysteresis
        try:
            scaler.update_scale(overflow)
        except Exception as error:
            # The error at the floor is a bare Exception; its subclasses are accidents.
            if type(error) is not Exception:
                yield type(error).__name__
                continue
            exhausted = 1
        else:
            exhausted = 0
        yield ScaleState(
            scale=float(scaler.cur_scale),
            cur_iter=scaler.cur_iter,
            last_overflow_iter=scaler.last_overflow_iter,
            cur_hysteresis=scaler.cur_hysteresis,
            exhausted=exhausted,
        )


def _by_wrapper(
    rule: WrapperRule, asked: Sequence[Asked], module: str, name: str
) -> Iterator[Answer]:
    update: Callable[..., None] = getattr(
        deepspeed(f"deepspeed.runtime.fp16.{module}"), name
    )._update_scale
    scalers = deepspeed("deepspeed.runtime.fp16.loss_scaler")
    given = {"init_scale": 1.0, "scale_window": rule.scale_window, "min_scale": rule.min_scale}
    config = scalers.LossScaleConfig(torch.float16, True, 1.0, given)
    this = SimpleNamespace(loss_scale_config=config, verbose=False)
    for state, overflow in asked:
        config.cur_scale, config.cur_iter = state.scale, state.cur_iter
        config.last_overflow_iter = state.last_overflow_iter
        update(this, overflow)
        yield ScaleState(
            scale=float(config.cur_scale),
            cur_iter=config.cur_iter,
            last_overflow_iter=config.last_overflow_iter,
            cur_hysteresis=state.cur_hysteresis,
        )


def by_torch(configuration: Configuration, asked: Sequence[Asked]) -> Iterator[Answer]:
    """Step by `torch.amp.GradScaler`, from a state dict each time."""
    rule = cast(TorchRule, configuration.rule)
    given: dict[str, Any] = {
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, **given)
    param = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([param], lr=0.0)
    for state, overflow in asked:
        scaler.load_state_dict(
            {"scale": state.scale, "_growth_tracker": state.growth_tracker, **given}
        )
        param.grad = torch.tensor([torch.inf if overflow else 1.0])
        scaler.scale(torch.ones(()))
        scaler.step(sgd)
        scaler.update()
        after = scaler.state_dict()
        yield ScaleState(
            scale=float(after["scale"]),
            cur_hysteresis=state.cur_hysteresis,
            growth_tracker=after["_growth_tracker"],
        )
