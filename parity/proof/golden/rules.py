"""Loss-scale rules replayed: the reference's rule by itself, and the rule that a whole step runs.

On the fast side that is the rule inside the finalise kernel: an `FP16Optimizer` holds the scaler,
its four weights are given gradients of 1, infinity or NaN, and it steps. The reference's wrapper
can do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter

from twinstep.contract.compat import Compat
from twinstep.contract.errors import MinimumLossScale
from twinstep.golden.trace import Header, Step
from twinstep.parity.proof.golden.sides import CLASSES, descent
from twinstep.reference.loss_scale import (
    DynamicRule,
    Rule,
    ScaleState,
    StaticRule,
    TorchRule,
    WrapperRule,
)

RULES = ("dynamic", "wrapper", "torch", "static")
COUNTERS = {
    "dynamic": ("cur_iter", "last_overflow_iter", "cur_hysteresis"),
    "wrapper": ("cur_iter", "last_overflow_iter"),
    "torch": ("growth_tracker",),
    "static": (),
}
NAMES = {"growth_factor": "scale_factor", "growth_interval": "scale_window"}
GRADIENT = {"o": torch.inf, "n": torch.nan}


def by_itself(header: Header) -> list[Step]:
    """Run the reference's rule through the steps of a trace."""
    rule = rule_of(header)
    steps: list[Step] = []
    for state in _states(header, rule):
        row = {name: getattr(state, name) for name in ("scale", *COUNTERS[header.rule])}
        steps.append(row | ({"raised": bool(state.exhausted)} if header.rule == "dynamic" else {}))
    return steps


def rule_of(header: Header) -> Rule:
    """The reference's rule with the constants of a trace."""
    given = {name: value for name, value in header.constants.items() if name != "override"}
    kinds: dict[str, Any] = {
        "dynamic": DynamicRule,
        "wrapper": WrapperRule,
        "torch": TorchRule,
        "static": StaticRule,
    }
    rule: Rule = kinds[header.rule](**given)
    return rule


def _states(header: Header, rule: Rule) -> Iterator[ScaleState]:
    """The state after each step of the trace."""
    state = ScaleState(
        scale=float(header.start["scale"]),
        cur_hysteresis=int(header.start.get("cur_hysteresis", 0)),
    )
    for letter in header.steps:
        state = replace(state, exhausted=0)
        if letter == "X":
            state = replace(state, scale=float(header.constants["override"]))
        elif letter != "R":
            state = rule.after(state, letter in GRADIENT)
        yield state


def _scaler_of(side: str, header: Header, compat: Compat) -> Any:
    """The scaler of a side with the constants of a trace."""
    scale = float(header.start["scale"])
    if header.rule == "static":
        return CLASSES[side]["static"](scale=scale)
    given = {NAMES.get(k, k): v for k, v in header.constants.items() if k != "override"}
    return CLASSES[side]["dynamic"](rule=header.rule, init_scale=scale, compat=compat, **given)


def in_a_step(side: str, kind: str, header: Header, compat: Compat) -> list[Step]:
    """Run the rule inside whole steps of a wrapper.

    Args:
        side: "fast" or "reference".
        kind: of the wrapper, "flat" or "unfused".
        header: of the trace.
        compat: of the wrapper and of the scaler.
    """
    weights, optimizer = _wrapped(side, kind, header, compat)
    steps: list[Step] = []
    for letter in header.steps:
        raised = False
        if letter == "R":
            weights, optimizer = _wrapped(
                side, kind, header, compat, optimizer.loss_scaler.state_dict()
            )
        elif letter == "X":
            optimizer.loss_scaler.loss_scale = float(header.constants["override"])
        else:
            weights.grad = torch.full((4,), GRADIENT.get(letter, 1.0))
            try:
                optimizer.step()
                _ = optimizer.overflow
            except MinimumLossScale:
                raised = True
            optimizer.zero_grad()
        state = optimizer.loss_scaler.state_dict()
        row: Step = {
            "scale": state["cur_scale"],
            **{name: state[name] for name in COUNTERS[header.rule]},
            **({"raised": raised} if header.rule == "dynamic" else {}),
        }
        steps.append(row)
    return steps


def _wrapped(
    side: str,
    kind: str,
    header: Header,
    compat: Compat,
    saved: dict[str, object] | None = None,
) -> tuple[Parameter, Any]:
    """Four weights, and a wrapper that holds the scaler of a trace."""
    weights = Parameter(torch.ones(4))
    inside = descent(side, [{"params": [weights], "lr": 1.0, "weight_decay": 0.0}])
    scaler = _scaler_of(side, header, compat)
    # Before the wrapper exists: a saved scaler is loaded as one that is alone.
    if saved is not None:
        scaler.load_state_dict(saved)
    kinds = CLASSES[side]
    optimizer = kinds[kind](inside, loss_scale_config=scaler, verbose=False, compat=compat)
    return weights, optimizer
