"""Sequences of a default run show most of what can meet: pairs of actions, and values."""

from __future__ import annotations

import pytest

from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.drawing import LISTED, NEAR, kind_of, sequence
from twinstep.parity.sequences.judge import SEQUENCES, over_ranks
from twinstep.parity.sequences.registry import RULES, ranked
from twinstep.parity.sequences.world import Act


def drawn(rules: Rules, count: int) -> list[list[Act]]:
    return [sequence(rules, 0, "fp32", number) for number in range(count)]


def pairs(sequences: list[list[Act]]) -> set[tuple[str, str]]:
    """Ordered pairs of actions, the second within three steps of the first."""
    return {
        (one.name, other.name)
        for acts in sequences
        for at, one in enumerate(acts)
        for other in acts[at + 1 : at + 1 + NEAR]
        if one.name != "build"
    }


def values(sequences: list[list[Act]], rules: Rules) -> float:
    """Share of the values of all arguments but seeds that occur."""
    known = rules.actions()
    shown = {(act.name, *item) for acts in sequences for act in acts for item in act.values.items()}
    every = {
        (row.name, name, value)
        for row in known.values()
        for name, choices in row.choices.items()
        for value in (choices if len(choices) <= LISTED else ())
    }
    return len(every & shown) / len(every)


@pytest.mark.parametrize("rules", RULES.values(), ids=lambda rules: type(rules).__name__)
def test_a_run_shows_most_pairs_and_values(rules: Rules) -> None:
    count = len(rules.actions()) - 1
    run = drawn(rules, SEQUENCES)
    assert len(pairs(run)) >= 0.5 * count**2
    assert values(run, rules) >= 0.95
    over = ranked(rules)
    if over is not None:
        count = len(over.actions()) - 1
        run = drawn(over, over_ranks(over, SEQUENCES))
        assert len(pairs(run)) >= 0.3 * count**2
        assert values(run, over) >= 0.9


@pytest.mark.parametrize("rules", RULES.values(), ids=lambda rules: type(rules).__name__)
def test_a_run_shows_every_motif(rules: Rules) -> None:
    for each, count in ((rules, SEQUENCES), (ranked(rules), None)):
        if each is not None:
            numbers = range(count or over_ranks(each, SEQUENCES))
            kinds = {kind_of(each, 0, "fp32", number) for number in numbers}
            assert kinds.issuperset(range(len(each.scripts())))


def test_a_sequence_is_the_same_whatever_was_drawn_before() -> None:
    rules = next(iter(RULES.values()))
    alone = sequence(type(rules)(), 7, "bf16", 20)
    assert [sequence(rules, 7, "bf16", number) for number in (3, 20)][1] == alone
    alone.clear()
    assert sequence(rules, 7, "bf16", 20)
