"""Make a failing sequence of actions as short and as plain as it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.drive import Mismatch
from twinstep.parity.sequences.world import Act

Acts = Sequence[Act]
Failing = Callable[[Acts], Mismatch | None]


def shrunk(
    acts: Acts, mismatch: Mismatch, failing: Failing, rules: Rules, limit: int
) -> tuple[Acts, Mismatch]:
    """Leave out actions, then bring every argument to its plainest value, as the limit allows.

    Args:
        acts: a failing sequence; the first builds the world and stays.
        mismatch: how it fails.
        failing: runs a sequence; how it fails, or None.
        rules: whose actions these are.
        limit: of actions in the sequences tried; a number, so that every run shrinks alike.
    """
    acts = list(acts[: mismatch.at + 1])
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(acts, rules):
            if limit <= 0:
                return acts, mismatch
            limit -= len(candidate)
            found = failing(candidate)
            if found is not None:
                acts, mismatch = list(candidate[: found.at + 1]), found
                progress = True
                break
    return acts, mismatch


def _smaller(acts: Acts, rules: Rules) -> Iterator[Acts]:
    """Candidates, the boldest first."""
    length = (len(acts) - 1) // 2
    while length >= 1:
        for start in range(1, len(acts) - length + 1, max(length // 2, 1)):
            yield [*acts[:start], *acts[start + length :]]
        length //= 2
    declared = rules.actions()
    for place, act in enumerate(acts):
        for name, value in act.values.items():
            choices = declared[act.name].choices[name]
            rank = choices.index(value)
            for simpler in dict.fromkeys((0, 1, rank // 2, rank - 1)):
                if 0 <= simpler < rank:
                    plainer = replace(act, values={**act.values, name: choices[simpler]})
                    yield [*acts[:place], plainer, *acts[place + 1 :]]
