"""Reachable states of a loss-scale rule, breadth first: states, not sequences of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from twinstep.reference.loss_scale import Rule, ScaleState

EVENTS = (False, True)  # clean, overflow


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A rule with the scales that it is started from.

    Attributes:
        name: words for messages.
        kind: "dynamic", "wrapper", "torch" or "static".
        rule: of the reference.
        starts: first scales.
        hysteresis: at first.
    """

    name: str
    kind: str
    rule: Rule
    starts: Sequence[float]
    hysteresis: int = 0

    def states(self) -> list[ScaleState]:
        """The first states."""
        return [ScaleState(scale=s, cur_hysteresis=self.hysteresis) for s in self.starts]


@dataclass
class Explored:
    """Steps of a rule from every state that it can reach.

    Attributes:
        states: reached, in the order of their depth.
        after: the next state, by state and event.
        origin: the state and the event that reached a state first; None for a first state.
        depth: the greatest.
        leaves: states at that depth, whose own steps were not taken.
    """

    states: list[ScaleState] = field(default_factory=list)
    after: dict[tuple[ScaleState, bool], ScaleState] = field(default_factory=dict)
    origin: dict[ScaleState, tuple[ScaleState, bool] | None] = field(default_factory=dict)
    depth: int = 0
    leaves: int = 0

    def witness(self, state: ScaleState) -> tuple[ScaleState, str]:
        """The first state and the shortest sequence that lead to a state."""
        letters = ""
        while (step := self.origin[state]) is not None:
            state, overflow = step
            letters = "go"[overflow] + letters
        return state, letters

    def steps(self) -> Iterator[tuple[ScaleState, bool, ScaleState]]:
        """Every transition, the shallow ones first."""
        for (state, overflow), after in self.after.items():
            yield state, overflow, after


def explored(configuration: Configuration, depth: int) -> Explored:
    """Every state that is reached within so many steps, and every step from those within fewer."""
    found = Explored()
    level = configuration.states()
    for state in level:
        found.origin[state] = None
    found.states += level
    rule = configuration.rule
    while level and found.depth < depth:
        found.depth += 1
        further: list[ScaleState] = []
        for state in level:
            for overflow in EVENTS:
                after = rule.after(state, overflow)
                found.after[state, overflow] = after
                # The host raises and goes on from a state that is not exhausted.
                rested = _rested(after)
                if rested not in found.origin:
                    found.origin[rested] = (state, overflow)
                    further.append(rested)
        found.states += further
        level = further
    found.leaves = len(level)
    return found


def _rested(state: ScaleState) -> ScaleState:
    if not state.exhausted:
        return state
    kept = {name: value for name, value in vars(state).items() if name != "exhausted"}
    return ScaleState(**kept)
