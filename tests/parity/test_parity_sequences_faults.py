"""Faults in each reference class are noticed: idle methods, a lost alias, a skipped step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from twinstep.parity.records.errors import CannotRun
from twinstep.parity.records.ledger import Status
from twinstep.parity.registry.engines import engine_named
from twinstep.parity.sequences.actions import public_properties
from twinstep.parity.sequences.drawing import EXTENDED, LONG, kind_of, sequence
from twinstep.parity.sequences.drive import Mismatch, run
from twinstep.parity.sequences.judge import TwinEffort, judge_twin
from twinstep.parity.sequences.registry import (
    REFERENCES,
    RULES,
    Twin,
    borrowed_twins,
    register_optimizer,
)

OPTIMIZERS = [name for name in REFERENCES if "Scale" not in name]
Step = Callable[..., object]


def twin_of(reference: type, body: dict[str, object]) -> Twin:
    """The reference class with something else in it, judged against itself."""
    # Copies by pickle look for it here.
    subject = type("Planted", (reference,), {"__module__": __name__, **body})
    globals()["Planted"] = subject
    with borrowed_twins() as found:
        register_optimizer(
            "planted",
            reference=reference,
            arithmetic="exact",
            dtypes=("bf16",),
            engines=("cpu",),
            rules=RULES[reference],
        )(subject)
    return found[0]


def noticed(twin: Twin, sequences: int, method: str = "") -> Mismatch | None:
    """The first difference, if there is any; of a method, in short sequences that drive it."""
    driving = {name for name, row in twin.rules.actions().items() if method in row.drives}
    for number in range(sequences):
        acts = sequence(twin.rules, 5, "bf16", number)
        short = kind_of(twin.rules, 5, "bf16", number) not in (LONG, *map(str, EXTENDED.values()))
        if method and (driving.isdisjoint(act.name for act in acts) or not short):
            continue
        mismatch = run(twin, "bf16", "cpu", acts)
        if mismatch is not None:
            return mismatch
    return None


@pytest.mark.parametrize("name", REFERENCES)
def test_nothing_is_noticed_where_nothing_is_planted(name: str) -> None:
    assert noticed(twin_of(REFERENCES[name], {}), 4) is None


def own_methods(cls: type) -> list[str]:
    """Public methods that a class has from the reference, not from torch."""
    homes = ("twinstep.contract.", "twinstep.reference.")
    ours = [kind for kind in cls.__mro__ if kind.__module__.startswith(homes)]
    names = {name for kind in ours for name, value in vars(kind).items() if callable(value)}
    return sorted(name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("name", REFERENCES)
def test_a_method_that_does_nothing_is_noticed(name: str) -> None:
    """So the actions that drive it do call it, and what it does can be seen."""
    cls = REFERENCES[name]
    methods = [one for one in own_methods(cls) if one not in RULES[cls].exempt]
    assert len(methods) >= 4
    idle: dict[str, object] = {one: lambda self, *given, **named: None for one in methods}
    quiet = [one for one in methods if noticed(twin_of(cls, {one: idle[one]}), 150, one) is None]
    assert quiet == []


@pytest.mark.parametrize("name", REFERENCES)
def test_a_property_that_cannot_be_assigned_is_noticed(name: str) -> None:
    cls = REFERENCES[name]
    for attribute in public_properties(cls):
        held = getattr(cls, attribute)
        if held.fset is None or attribute in RULES[cls].exempt:
            continue
        deaf = property(held.fget, lambda self, value: None)
        assert noticed(twin_of(cls, {attribute: deaf}), 150) is not None, attribute


def after_step(fault: Callable[[Any], None]) -> Callable[[type], dict[str, object]]:
    """A class body whose step does something more at the end."""

    def body(cls: type) -> dict[str, object]:
        def step(self: Any, *given: object, **named: object) -> object:
            result = cls.step(self, *given, **named)  # type: ignore[attr-defined]
            fault(self)
            return result

        return {"step": step}

    return body


@after_step
def extra(optimizer: Any) -> None:
    """One more tensor."""
    optimizer.extra = torch.zeros(2)


@after_step
def entry(optimizer: Any) -> None:
    """One more entry in the state of a parameter."""
    for state in optimizer.state.values():
        state["ema"] = 1.0


@after_step
def dtype(optimizer: Any) -> None:
    """A moment in float64: the values are the same."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if state.get(name) is not None:
                state[name] = state[name].double()


@after_step
def alias(optimizer: Any) -> None:
    """A parameter, or a master where it is a parameter of the optimizer inside, moves away."""
    if hasattr(optimizer, "fp32_groups"):
        optimizer.fp32_groups = [[one.clone() for one in row] for row in optimizer.fp32_groups]
        return
    groups = getattr(optimizer, "fp16_groups", None) or getattr(optimizer, "bf16_groups", None)
    for row in groups or [group["params"] for group in optimizer.param_groups]:
        for param in row:
            param.data = param.data.clone()


@after_step
def sharing(optimizer: Any) -> None:
    """Both moments in the same memory, as long as they are equal."""
    for state in optimizer.state.values():
        if state.get("exp_avg") is not None and torch.equal(state["exp_avg"], state["exp_avg_sq"]):
            state["exp_avg_sq"] = state["exp_avg"]


def skipped(cls: type) -> dict[str, object]:
    """Every other step is left out."""
    turns = []

    def step(self: Any, *given: object, **named: object) -> object:
        turns.append(0)
        return None if len(turns) % 2 else cls.step(self, *given, **named)  # type: ignore[attr-defined]

    return {"step": step}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fault", [extra, entry, dtype, alias, sharing, skipped])
def test_a_planted_fault_is_noticed(fault: Callable[[type], dict[str, object]], name: str) -> None:
    assert noticed(twin_of(REFERENCES[name], fault(REFERENCES[name])), 60) is not None


def test_what_cannot_be_run_is_no_smaller_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = noticed(twin_of(REFERENCES["FusedAdam"], skipped(REFERENCES["FusedAdam"])), 60)
    given = iter([found])

    def runs(*arguments: object) -> Mismatch | None:
        for mismatch in given:
            return mismatch
        raise CannotRun("no device")

    monkeypatch.setattr("twinstep.parity.sequences.judge.run", runs)
    effort = TwinEffort(repros=None)
    cell = judge_twin(twin_of(REFERENCES["FusedAdam"], {}), "bf16", engine_named("cpu"), effort)
    assert cell.status is Status.FAILED
    assert "no device" not in cell.failure
