"""Replaying golden traces: what the reference does in the situation that a trace records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from twinstep.contract.compat import CORRECT, Compat
from twinstep.golden.trace import Header, Step, Trace
from twinstep.parity.proof.gates import golden_traces_wrappers
from twinstep.reference.arithmetic import float64
from twinstep.reference.loss_scale import DynamicRule, Rule, ScaleState, TorchRule, WrapperRule
from twinstep.reference.mixed_step import mixed_step


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
    return [
        {**_remembered(state, rule), "raised": bool(state.exhausted)}
        for state in _states(header, rule)
    ]


def _wrapper(header: Header) -> list[Step]:
    rule = WrapperRule(
        scale_window=int(header.constants["scale_window"]),
        min_scale=float(header.constants["min_scale"]),
    )
    return [_remembered(state, rule) for state in _states(header, rule)]


def _torch(header: Header) -> list[Step]:
    rule = TorchRule(
        growth_factor=float(header.constants["growth_factor"]),
        backoff_factor=float(header.constants["backoff_factor"]),
        growth_interval=int(header.constants["growth_interval"]),
    )
    return [_remembered(state, rule) for state in _states(header, rule)]


def _states(header: Header, rule: Rule) -> Iterator[ScaleState]:
    """The state after each step of the trace."""
    state = ScaleState(
        scale=float(header.start["scale"]),
        cur_hysteresis=int(header.start.get("cur_hysteresis", 0)),
    )
    for letter in header.steps:
        state = rule.after(replace(state, exhausted=0), letter == "o")
        yield state


def _remembered(state: ScaleState, rule: Rule) -> Step:
    return {name: getattr(state, name) for name in ("scale", *rule.remembers)}


def _wrapper_step(header: Header, compat: Compat) -> list[Step]:
    """Four weights, true gradient 1, plain gradient descent with learning rate 1.

    Adam with both betas 0, without bias correction, and with eps = lr far above the gradient moves
    by lr g / (|g| + eps), which is g exactly for the powers of two that occur here.
    """
    rule = WrapperRule(
        scale_window=int(header.constants["scale_window"]),
        min_scale=float(header.constants["min_scale"]),
    )
    p, state = torch.zeros(4), ScaleState(scale=float(header.start["scale"]))
    zero, huge = float64(0.0), float64(2.0**30)
    steps: list[Step] = []
    for letter in header.steps:
        gradient = torch.full((4,), torch.inf if letter == "o" else state.scale)
        result = mixed_step(
            [p],
            [gradient],
            [torch.zeros(4)],
            [torch.zeros(4)],
            [],
            [torch.tensor(0)],
            lr=huge,
            beta1=zero,
            beta2=zero,
            eps=huge,
            weight_decay=zero,
            max_norm=zero,
            scaling=state,
            rule=rule.after,
            adam_w_mode=True,
            bias_correction=False,
            compat=compat,
        )
        (new_p,), state = result.lists[0], result.scaling
        skipped = bool(result.found_inf.item())
        steps.append(
            {
                "scale": state.scale,
                "applied": (p - new_p)[0].item(),
                "norm": 0.0 if skipped else result.norm.item(),
                "skipped": skipped,
            }
        )
        p = new_p
    return steps


RULES: dict[str, Callable[[Header], list[Step]]] = {
    "dynamic": _dynamic,
    "wrapper": _wrapper,
    "torch": _torch,
}
