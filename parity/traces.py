"""Replaying golden traces: what the reference does in the situation that a trace records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from golden.trace import Header, Step, Trace, Value
from reference.errors import MinimumLossScale
from reference.loss_scale import (
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

Constants = Mapping[str, Value]


def replayed(header: Header) -> list[Step]:
    """Run the reference's rule through the steps of a trace.

    Raises:
        ValueError: the rule is unknown.
    """
    if header.rule not in RULES:
        names = ", ".join(RULES)
        raise ValueError(f"rule={header.rule!r}, but should be one of {names} [{header.name}]")
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


RULES: dict[str, Callable[[Header], list[Step]]] = {
    "dynamic": _dynamic,
    "wrapper": _wrapper,
    "torch": _torch,
}
