"""Replaying golden traces: what the reference does in the situation that a trace records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twinstep.contract.compat import CORRECT, Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.golden.trace import Header, Step, Trace
from twinstep.parity.proof.gates import golden_traces_wrappers
from twinstep.reference.loss_scale import (
    DynamicRule,
    DynamicState,
    TorchRule,
    TorchState,
    WrapperRule,
    WrapperState,
    update_dynamic,
    update_torch,
    update_wrapper,
)
from twinstep.reference.mixed_step import MixedResult, mixed_step
from twinstep.reference.update_scale import float64, int64


def replayed(header: Header, compat: Compat = CORRECT) -> list[Step]:
    """Run the reference through the steps of a trace.

    Args:
        header: of the trace.
        compat: what whole steps reproduce; a rule alone has no choice to make.

    Raises:
        ValueError: the rule is unknown.
    """
    if header.rule not in (*RULES, "wrapper_step", *golden_traces_wrappers.RULES):
        names = ", ".join([*RULES, "wrapper_step", *golden_traces_wrappers.RULES])
        raise ValueError(f"rule={header.rule!r}, but should be one of {names} [{header.name}]")
    if header.rule == "wrapper_step":
        return _wrapper_step(header, compat)
    if header.rule in golden_traces_wrappers.RULES:
        return golden_traces_wrappers.whole_steps(header, compat)
    return RULES[header.rule](header)


def first_difference(trace: Trace, steps: list[Step]) -> str:
    """Name the first step and field that differ; empty when nothing does.

    Args:
        trace: what was recorded.
        steps: what a side did, in the same order.
    """
    name = trace.header.name
    if len(steps) != len(trace.steps):
        return f"{name}: {len(steps)} steps were replayed, but {len(trace.steps)} were recorded"
    for index, (wanted, got) in enumerate(zip(trace.steps, steps, strict=True)):
        for field in sorted(wanted.keys() | got.keys()):
            if field not in got or field not in wanted or got[field] != wanted[field]:
                return (
                    f"{name}, step {index} ({trace.header.steps[index]}), {field}: "
                    f"{got.get(field)} was replayed, but {wanted.get(field)} was recorded"
                )
    return ""


def _dynamic(header: Header) -> list[Step]:
    given = header.constants
    rule = DynamicRule(
        scale_window=int(given["scale_window"]),
        min_scale=float(given["min_scale"]),
        delayed_shift=int(given["delayed_shift"]),
        consecutive_hysteresis=bool(given["consecutive_hysteresis"]),
        raise_error_at_min_scale=bool(given["raise_error_at_min_scale"]),
    )
    state = DynamicState(
        scale=float(header.start["scale"]), cur_hysteresis=int(header.start["cur_hysteresis"])
    )
    steps: list[Step] = []
    for letter in header.steps:
        raised = False
        try:
            state = update_dynamic(state, letter == "o", rule)
        except MinimumLossScale:
            raised = True
        steps.append({**vars(state), "raised": raised})
    return steps


def _wrapper(header: Header) -> list[Step]:
    rule = WrapperRule(
        scale_window=int(header.constants["scale_window"]),
        min_scale=float(header.constants["min_scale"]),
    )
    state = WrapperState(scale=float(header.start["scale"]))
    steps: list[Step] = []
    for letter in header.steps:
        state = update_wrapper(state, letter == "o", rule)
        steps.append(dict(vars(state)))
    return steps


def _torch(header: Header) -> list[Step]:
    rule = TorchRule(
        growth_factor=float(header.constants["growth_factor"]),
        backoff_factor=float(header.constants["backoff_factor"]),
        growth_interval=int(header.constants["growth_interval"]),
    )
    state = TorchState(scale=float(header.start["scale"]))
    steps: list[Step] = []
    for letter in header.steps:
        state = update_torch(state, letter == "o", rule)
        steps.append(dict(vars(state)))
    return steps


def _wrapper_step(header: Header, compat: Compat) -> list[Step]:
    """Four weights, true gradient 1, plain gradient descent with learning rate 1.

    Adam with both betas 0, without bias correction, and with eps = lr far above the gradient moves
    by lr g / (|g| + eps), which is g exactly for the powers of two that occur here.
    """
    p, scale = torch.zeros(4), float64(float(header.start["scale"]))
    cur_iter, last = int64(0), int64(-1)
    still = _still(int(header.constants["scale_window"]), float(header.constants["min_scale"]))
    step: Callable[..., MixedResult] = mixed_step
    steps: list[Step] = []
    for letter in header.steps:
        gradient = torch.full((4,), torch.inf if letter == "o" else scale.item())
        controls = {"scale": scale, "cur_iter": cur_iter, "last_overflow_iter": last}
        m, v = torch.zeros(4), torch.zeros(4)
        lists: tuple[list[Tensor], ...] = ([p], [gradient], [m], [v], [], [int64(0)])
        result = step(*lists, **controls, **still, **OPTIONS, compat=compat)
        (new_p,), scale, cur_iter, last = result[0], *result[5:8]
        norm, skipped = result[11].item(), bool(result[12].item())
        applied = (p - new_p)[0].item()
        steps.append(
            {
                "scale": scale.item(),
                "applied": applied,
                "norm": 0.0 if skipped else norm,
                "skipped": skipped,
            }
        )
        p = new_p
    return steps


OPTIONS = {
    "adam_w_mode": True,
    "bias_correction": False,
    "rule": "wrapper",
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": False,
}


def _still(scale_window: int, min_scale: float) -> dict[str, Tensor]:
    """Controls that stay the same over a replay."""
    zero, huge, off = float64(0.0), float64(2.0**30), int64(0)
    adam = {"lr": huge, "eps": huge, "beta1": zero, "beta2": zero, "weight_decay": zero}
    rule = {"scale_factor": float64(2.0), "scale_window": int64(scale_window)}
    unused = {"cur_hysteresis": off, "growth_tracker": off, "exhausted": off, "delayed_shift": off}
    written = {"norm": torch.tensor(0.0), "found_inf": torch.tensor(0.0)}
    limits = {"max_norm": zero, "min_scale": float64(min_scale), "backoff_factor": float64(0.5)}
    return {**adam, **rule, **unused, **written, **limits}


RULES: dict[str, Callable[[Header], list[Step]]] = {
    "dynamic": _dynamic,
    "wrapper": _wrapper,
    "torch": _torch,
}
