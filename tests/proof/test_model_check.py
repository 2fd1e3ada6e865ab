"""The loss scalers explored: states, invariants of rules, and others beside the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import pytest

from tests.helpers.command import parity
from twinstep.golden.trace import read
from twinstep.parity.proof.model_check import check as checking
from twinstep.parity.proof.model_check.check import FAST, FAST_NAN, TORCH, check
from twinstep.parity.proof.model_check.configurations import configurations
from twinstep.parity.proof.model_check.contrasts import (
    CONTRASTS,
    WITNESSES,
    contrasts,
    trace_of,
)
from twinstep.parity.proof.model_check.explore import Configuration, explored
from twinstep.parity.proof.model_check.steppers import Answer, Asked
from twinstep.reference.loss_scale import (
    DynamicRule,
    Rule,
    ScaleState,
    TorchRule,
    WrapperRule,
)

EVERY = configurations()
# Small spaces of each kind, to the whole depth.
SAMPLE = [
    next(c for c in EVERY if c.name == name)
    for name in (
        "static",
        "wrapper, window 3",
        "torch, interval 2, factors 2.0 and 0.5",
        "dynamic, window 4, hysteresis 0, raises at the floor",
    )
]


def test_a_sample_agrees_to_the_whole_depth() -> None:
    found = check(SAMPLE)
    assert found.invariants == []
    assert found.unexplained() == []
    assert (found.configurations, found.depth) == (4, 20)
    assert found.compared[FAST] == found.compared[FAST_NAN] == found.steps > 5000
    assert found.compared[TORCH] > 200


def test_there_are_all_configurations() -> None:
    assert len({c.name for c in EVERY}) == len(EVERY) == 113
    rules = [c.rule for c in EVERY if isinstance(c.rule, DynamicRule)]
    chosen = {(r.scale_window, r.delayed_shift, r.raise_error_at_min_scale) for r in rules}
    assert len(chosen) == 4 * 4 * 2


def test_states_are_reached_by_their_witness() -> None:
    space = explored(SAMPLE[1], 6)
    for state in space.states:
        start, letters = space.witness(state)
        for letter in letters:
            start = SAMPLE[1].rule.after(start, letter == "o")
        assert start == state
        assert len(letters) == state.cur_iter <= 6
    assert len(space.after) == 2 * (len(space.states) - space.leaves)


class EarlyGrowth(WrapperRule):
    """Grows a step too soon."""

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """As the rule a step later."""
        return super().after(replace(state, cur_iter=state.cur_iter + 1), found_inf)


class NeverRefilled(DynamicRule):
    """Growth leaves the hysteresis as it is."""

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """As the rule, but for the hysteresis of a clean step."""
        after = super().after(state, found_inf)
        return after if found_inf else replace(after, cur_hysteresis=state.cur_hysteresis)


class BelowTheFloor(WrapperRule):
    """Has no floor."""

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """As the rule, but for the scale after an overflow."""
        after = super().after(state, found_inf)
        return replace(after, scale=state.scale / 2) if found_inf else after


class Uncounted(TorchRule):
    """An overflow leaves clean steps counted."""

    def after(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """As the rule, but for the tracker after an overflow."""
        after = super().after(state, found_inf)
        return replace(after, growth_tracker=state.growth_tracker) if found_inf else after


WRONG: list[tuple[str, Rule, str]] = [
    ("wrapper", EarlyGrowth(scale_window=2), "a step is counted once"),
    ("dynamic", NeverRefilled(scale_window=2), "the hysteresis is refilled by growth"),
    ("wrapper", BelowTheFloor(scale_window=2), "an overflow leads a scale below twice the floor"),
    ("torch", Uncounted(growth_interval=2), "an overflow left clean steps counted"),
]


@pytest.mark.parametrize(("kind", "rule", "sentence"), WRONG, ids=lambda value: str(value)[:20])
def test_a_wrong_rule_breaks_an_invariant(kind: str, rule: Rule, sentence: str) -> None:
    made = Configuration(name="wrong", kind=kind, rule=rule, starts=(4.0, 1.0), hysteresis=2)
    broken = list(checking._invariants(made, explored(made, 6)))
    assert any(sentence in one for one in broken)


def test_a_difference_has_the_shortest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(configuration: Configuration, asked: Sequence[Asked]) -> Iterator[Answer]:
        rule = cast(WrapperRule, configuration.rule)
        for state, overflow in asked:
            after = rule.after(state, overflow)
            grown = after.scale > state.scale and state.last_overflow_iter >= 0
            yield replace(after, scale=state.scale) if grown else after

    monkeypatch.setattr(checking, "steppers", lambda: {"forgetful": forgets})
    (one,) = check([SAMPLE[1]], 8).unexplained()
    # An overflow, a window of three clean steps, and the one that should grow.
    assert (one.letters, one.start.scale) == ("ogggg", 4.0)
    assert one.says == "scale is 2.0, the reference has 4.0"


def test_rules_differ_where_it_is_said_and_the_witnesses_are_kept() -> None:
    found = contrasts(20)
    assert all(bool(letters) == bool(contrast.says) for contrast, letters, _ in found)
    kept = {
        trace_of(c, letters).header.name: trace_of(c, letters) for c, letters, _ in found if letters
    }
    assert {path.stem for path in WITNESSES.glob("*.jsonl")} == set(kept)
    assert all(read(WITNESSES / f"{name}.jsonl") == trace for name, trace in kept.items())
    letters = {contrast.name: letters for contrast, letters, _ in found}
    assert letters["torch_is_deepspeed_014_above_the_floor"] == "ooo"
    assert letters["wrapper_is_dynamic_without_hysteresis"] == ""
    assert len(CONTRASTS) == 7


def test_the_command_prints_how_much_it_explored(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity("model-check", "--depth", "4", "--sample", "40") == 0
    out = capsys.readouterr().out
    assert "3 configurations" in out
    assert "states to depth 4" in out
    assert "0 invariants broken, 0 unknown differences" in out
