"""All configurations explored, their invariants held, and every other class stepped beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from twinstep.parity.proof.golden.verify import engine
from twinstep.parity.proof.model_check.configurations import configurations
from twinstep.parity.proof.model_check.explore import Configuration, Explored, explored
from twinstep.parity.proof.model_check.invariants import broken
from twinstep.parity.proof.model_check.steppers import (
    Answer,
    Asked,
    by_deepspeed,
    by_finalise,
    by_torch,
    by_unfused,
)
from twinstep.parity.proof.peers.installed import is_installed
from twinstep.reference.loss_scale import DynamicRule, ScaleState

DEPTH = 20
FAST = "fast, finalise kernel"
FAST_NAN = "fast, finalise kernel, NaN"
SCALER = "deepspeed, DynamicLossScaler"
FLAT = "deepspeed, FP16_Optimizer"
UNFUSED = "deepspeed, FP16_UnfusedOptimizer"
TORCH = "torch, GradScaler"
Stepper = Callable[[Configuration, Sequence[Asked]], Iterator[Answer]]
FIELDS: Mapping[str, tuple[str, ...]] = {
    "dynamic": ("scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "exhausted"),
    "wrapper": ("scale", "cur_iter", "last_overflow_iter"),
    "torch": ("scale", "growth_tracker"),
    "static": ("scale", "cur_iter"),
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The shallowest step in which a class does otherwise than the reference.

    Attributes:
        configuration: of the rule.
        who: of the others.
        start: first state.
        letters: shortest sequence that shows it, the differing step last.
        says: field, and both values.
        count: steps that differ in this configuration.
    """

    configuration: Configuration
    who: str
    start: ScaleState
    letters: str
    says: str
    count: int


@dataclass
class Checked:
    """Counts and findings of an exploration.

    Attributes:
        configurations: number of them.
        states: reached, over all of them.
        steps: of the reference.
        compared: steps compared with each of the others.
        invariants: broken ones, a sentence each with the shortest sequence.
        differences: of others from the reference.
        depth: of the exploration.
        seconds: that it took.
    """

    configurations: int = 0
    states: int = 0
    steps: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    invariants: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    depth: int = 0
    seconds: float = 0.0

    def unexplained(self) -> list[Difference]:
        """Differences that no known behaviour of another project explains."""
        return [one for one in self.differences if not known(one)]


def known(difference: Difference) -> str:
    """The known reason of a difference; empty where there is none."""
    if difference.who == SCALER and "OverflowError" in difference.says:
        return "at an infinite scale DeepSpeed's log line cannot write infinity as an integer"
    return ""


def silent(words: str) -> None:
    """Tell nothing."""
    del words


def check(
    chosen: Iterable[Configuration] | None = None,
    depth: int = DEPTH,
    told: Callable[[str], None] = silent,
) -> Checked:
    """Explore configurations and compare.

    Args:
        chosen: configurations; None takes all.
        depth: steps from a first state.
        told: called with the name of each configuration.
    """
    began = time.perf_counter()
    found = Checked(depth=depth)
    others = steppers()
    with engine():
        for configuration in configurations() if chosen is None else chosen:
            told(configuration.name)
            space = explored(configuration, depth)
            found.configurations += 1
            found.states += len(space.states)
            found.steps += len(space.after)
            found.invariants += _invariants(configuration, space)
            for who, step in others.items():
                if _fits(who, configuration):
                    found.compared[who] = found.compared.get(who, 0) + len(space.after)
                    found.differences += _compared(configuration, space, who, step)
    found.seconds = time.perf_counter() - began
    return found


def steppers() -> dict[str, Stepper]:
    """Everybody that can be stepped here, by name."""
    found: dict[str, Stepper] = {FAST: by_finalise, FAST_NAN: partial(by_finalise, nan=True)}
    found[TORCH] = by_torch
    if is_installed("deepspeed"):
        found |= {SCALER: by_deepspeed, FLAT: by_deepspeed, UNFUSED: by_unfused}
    return found


def _fits(who: str, configuration: Configuration) -> bool:
    rule = configuration.rule
    if who == SCALER:
        # The growth of 0.14 is no longer there.
        return isinstance(rule, DynamicRule) and not rule.growth_counts_this_step
    kinds = {TORCH: "torch", FLAT: "wrapper", UNFUSED: "wrapper"}
    return kinds.get(who, configuration.kind) == configuration.kind


def _invariants(configuration: Configuration, space: Explored) -> Iterator[str]:
    said: set[str] = set()
    for state, overflow, after in space.steps():
        for sentence in broken(configuration, state, overflow, after):
            if sentence not in said:
                said.add(sentence)
                start, letters = space.witness(state)
                sequence = letters + "go"[overflow]
                yield f"{configuration.name}, from {start.scale}, {sequence}: {sentence}"


def _compared(
    configuration: Configuration, space: Explored, who: str, step: Stepper
) -> list[Difference]:
    names = FIELDS[configuration.kind]
    first: tuple[Asked, str] | None = None
    count = 0
    asked = list(space.after)
    for question, answer in zip(asked, step(configuration, asked), strict=True):
        says = _differs(space.after[question], answer, names)
        if says:
            count += 1
            # Asked in the order of depth: the first is the shortest.
            first = first or (question, says)
    if first is None:
        return []
    (state, overflow), says = first
    start, letters = space.witness(state)
    return [
        Difference(
            configuration=configuration,
            who=who,
            start=start,
            letters=letters + "go"[overflow],
            says=says,
            count=count,
        )
    ]


def _differs(mine: ScaleState, theirs: Answer, names: Sequence[str]) -> str:
    if isinstance(theirs, str):
        return f"{theirs} was raised"
    for name in names:
        one, other = getattr(mine, name), getattr(theirs, name)
        if one != other:
            return f"{name} is {other}, the reference has {one}"
    return ""
