"""Motifs, arguments of constructors and places in memory: sequences reach what is rare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.helpers.profile import LONG
from twinstep.parity.records.errors import UsageError
from twinstep.parity.sequences import OptimizerRules, register_optimizer
from twinstep.parity.sequences.actions import Action
from twinstep.parity.sequences.damage import HOW, aged, damaged
from twinstep.parity.sequences.drawing import sequence
from twinstep.parity.sequences.drive import Side
from twinstep.parity.sequences.observe import Walk, differences
from twinstep.parity.sequences.registry import (
    REFERENCES,
    RULES,
    Twin,
    borrowed_twins,
    constructor_arguments,
)
from twinstep.parity.sequences.world import Act, World, observe

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", REFERENCES)
def test_every_motif_can_be_drawn(name: str) -> None:
    """But for those with actions that a wrapper does not have."""
    rules = RULES[REFERENCES[name]]
    left = [motif for motif in rules.motifs if rules.motifs[motif] not in rules.scripts()]
    some = {"a copy", "31 bits of counters full, gradients for all"}
    missing = some if "Optimizer" in name else set[str]()
    if name == "FusedLAMB":  # its state begins with its first step
        missing = {name for name, motif in rules.motifs.items() if "initialize_states" in motif}
    assert set(left) <= missing
    assert len(rules.scripts()) >= 10


@pytest.mark.parametrize("name", REFERENCES)
def test_arguments_that_rules_name_are_really_passed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`passed` and the like are believed at registration, so they are held against the calls."""
    reference, seen = REFERENCES[name], set[str]()
    plain: Callable[..., None] = getattr(reference, "__init__")  # noqa: B009

    def spying(self: object, *given: object, **named: object) -> None:
        seen.update(first[: len(given)], named)
        plain(self, *given, **named)

    first = [*inspect.signature(reference).parameters]
    rules = RULES[reference]
    claimed = rules.arguments() & constructor_arguments(reference)
    monkeypatch.setattr(reference, "__init__", spying)
    for number in range(150):
        side = Side(reference, rules, "fp32", "cpu")
        for act in sequence(rules, 0, "fp32", number):
            if act.name == "build" or act.name.startswith("construct_"):
                side.carry_out(act)
        if claimed <= seen:
            break
    assert claimed <= seen, claimed - seen


class Plain(torch.optim.Optimizer):
    """A reference with an argument that its rules may forget."""

    def __init__(self, params: Any, *, lr: float = 1e-3, nudge: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "nudge": nudge})


class Forgetful(OptimizerRules):
    """Passes lr alone."""

    exempt = {**OptimizerRules.exempt, "step": "there is none"}


def test_a_constructor_argument_that_nothing_passes_is_named() -> None:
    claims: dict[str, Any] = {"reference": Plain, "arithmetic": "exact"}
    with borrowed_twins():
        with pytest.raises(UsageError, match="no action of Forgetful passes nudge"):
            register_optimizer("plain", rules=Forgetful(), **claims)(Plain)
        exempt = type("Told", (Forgetful,), {"exempt": {**Forgetful.exempt, "nudge": "unused"}})
        register_optimizer("plain", rules=exempt(), **claims)(Plain)


def test_a_tensor_that_is_made_anew_is_seen_and_one_that_stays_is_not() -> None:
    held = {"a": torch.zeros(3)}
    walks: list[Walk] = []
    for change in (lambda: None, lambda: held.update(a=held["a"].clone())):
        change()
        walks.append(Walk(home=CPU, before=walks[-1].places if walks else {}))
        walks[-1].root("x", held)
    moved, stays = walks[1].leaves, walks[0].leaves
    assert [row.got for row in differences(moved, stays)] == ["in other memory than before"]
    assert differences(stays, moved) == []


def test_addresses_in_texts_are_not_compared() -> None:
    # torch makes such a text of one that stands for a tensor in a loaded state.
    walks = [Walk(home=CPU), Walk(home=CPU)]
    for walk, text in zip(walks, ("<generator at 0x7f0a>", "<generator at 0x7f1b>"), strict=True):
        walk.root("x", text)
    assert differences(walks[0].leaves, walks[1].leaves) == []


@pytest.mark.parametrize("how", HOW)
def test_damage_changes_one_entry_and_all_learning_rates(how: str) -> None:
    def state(lr: float = 0.25) -> dict[str, Any]:
        return {
            "state": {0: {"step": torch.tensor(1), "exp_avg": torch.ones(2)}},
            "param_groups": [{"lr": lr, "params": [0]}],
        }

    changed = 0
    for seed in range(20):
        found = damaged(state(), seed, how)
        changed += str(found) != str(state(0.375))
        groups = found.get("param_groups")
        if isinstance(groups, list) and groups and isinstance(groups[0], dict):
            assert groups[0].get("lr") == 0.375
    assert changed >= 15


def test_a_state_ages_in_all_of_its_counters() -> None:
    old = {"state": {0: {"step": torch.tensor(1)}}, "cur_iter": 3, "last_overflow_iter": 1}
    assert str(aged(old, 2**31, 7)) == str(
        {
            "state": {0: {"step": torch.tensor(2**31)}},
            "cur_iter": 2**31,
            "last_overflow_iter": 2**31 - 7,
        }
    )


def machine(twin: Twin, dtype: str) -> type[RuleBasedStateMachine]:
    """A state machine whose rules are the actions, on both sides of a twin."""

    def values(declared: Action) -> dict[str, Any]:
        return {name: st.sampled_from(row) for name, row in declared.choices.items()}

    def doing(declared: Action) -> Callable[..., None]:
        def do(self: Any, **given: Any) -> None:
            for side in self.sides:
                side.carry_out(Act(declared.name, given))
            found = differences(self.sides[1].seen(twin), self.sides[0].seen(twin))
            assert not found, found[0]

        do.__name__ = declared.name
        return do

    def begun(self: Any) -> None:
        RuleBasedStateMachine.__init__(self)
        self.sides = [Side(cls, twin.rules, dtype, "cpu") for cls in (twin.reference, twin.subject)]

    rows = twin.rules.actions()
    body = {
        name: (initialize if name == "build" else rule)(**values(row))(doing(row))
        for name, row in rows.items()
    }
    return type("Sequences", (RuleBasedStateMachine,), {"__init__": begun, **body})


def planted(name: str, body: dict[str, object]) -> Twin:
    cls = REFERENCES[name]
    with borrowed_twins() as found:
        register_optimizer("planted", reference=name, arithmetic="exact", engines=("cpu",))(
            type("Planted", (cls,), body) if body else cls
        )
    return found[0]


ONCE = settings(max_examples=60, database=None, phases=[Phase.generate])
EFFORT = settings(max_examples=settings().max_examples // 20 if LONG else 3, stateful_step_count=20)


@pytest.mark.parametrize("name", ["FusedLamb", "FP16Optimizer", "DynamicLossScale"])
def test_rules_make_a_state_machine_that_a_reference_keeps(name: str) -> None:
    run_state_machine_as_test(machine(planted(name, {}), "bf16"), settings=EFFORT)


def test_the_state_machine_finds_a_fault() -> None:
    def update(self: Any, overflow: bool) -> None:
        REFERENCES["DynamicLossScale"].update_scale(self, False)  # type: ignore[attr-defined]

    wrong = machine(planted("DynamicLossScale", {"update_scale": update}), "fp32")
    with pytest.raises(AssertionError, match="Difference"):
        run_state_machine_as_test(wrong, settings=ONCE)


def test_what_an_option_offloads_may_be_on_the_cpu() -> None:
    """The reference, which is on the CPU, has all tensors there."""
    says = []
    for options in ({}, {"offload_optimizer_config": {"device": "cpu"}}):
        made = World(object, dict(options), [], [torch.zeros(1)], torch.device("meta"))
        says.append(observe(made, outcome={})["optimizer[0]"].says)
    assert says == ["tensor float32 (1,) on cpu", "tensor float32 (1,)"]
