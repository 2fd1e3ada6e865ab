"""Rules that differ, and the shortest sequence of events that shows it, kept as a trace.

Two rules start from the same scale and see the same events; pairs of their states are explored
breadth first until scales differ. A pair that never differs is equal to that depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from twinstep.golden.trace import Header, Step, Trace, write
from twinstep.parity.proof.model_check.explore import EVENTS
from twinstep.reference.loss_scale import (
    DynamicRule,
    Rule,
    ScaleState,
    StaticRule,
    TorchRule,
    WrapperRule,
)

WITNESSES = Path(__file__).resolve().parents[3] / "golden" / "witnesses"
VERSION = "0.1.0"
COMMAND = "parity model-check --write"
KINDS = {DynamicRule: "dynamic", WrapperRule: "wrapper", TorchRule: "torch", StaticRule: "static"}


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two rules that may differ.

    Attributes:
        name: of the witness.
        one: a rule; the witness is its trace.
        other: another.
        says: in words, where they part; empty where they never should.
        start: scale of both.
    """

    name: str
    one: Rule
    other: Rule
    says: str = ""
    start: float = 4.0


SILENT = DynamicRule(scale_window=2, delayed_shift=1, raise_error_at_min_scale=False, min_scale=1.0)
TWO = replace(SILENT, delayed_shift=2)
WRAPPER = WrapperRule(scale_window=2)
TORCH = TorchRule(growth_interval=2)
CONTRASTS = (
    Contrast(name="wrapper_is_dynamic_without_hysteresis", one=WRAPPER, other=SILENT),
    Contrast(
        name="growth_of_deepspeed_014",
        one=SILENT,
        other=replace(SILENT, growth_counts_this_step=True),
        says="DeepSpeed 0.14 grew with the last step of a window, 0.19.8 one step later (LS-4)",
    ),
    Contrast(
        name="torch_grows_a_step_before_deepspeed",
        one=TORCH,
        other=WRAPPER,
        says="torch grows with the last step of an interval, DeepSpeed one step later",
    ),
    Contrast(
        name="torch_is_deepspeed_014_above_the_floor",
        one=TORCH,
        other=replace(SILENT, growth_counts_this_step=True),
        says="torch has no floor",
    ),
    Contrast(
        name="hysteresis_forgives_the_first_overflow",
        one=TWO,
        other=SILENT,
        says="a hysteresis of 2 forgives one overflow",
    ),
    Contrast(
        name="hysteresis_refilled_by_clean_steps",
        one=TWO,
        other=replace(TWO, consecutive_hysteresis=True),
        says="a clean step between two overflows refills the hysteresis",
    ),
    Contrast(
        name="floor_lifts_a_scale_below_it",
        one=WRAPPER,
        other=replace(WRAPPER, min_scale=0.125),
        says="an overflow raises a scale that is below the floor",
        start=0.5,
    ),
)


def witness(contrast: Contrast, depth: int) -> tuple[str, int]:
    """The shortest sequence after which two rules have other scales, and pairs of states explored.

    The sequence is empty where there is none within the depth.
    """
    first = tuple(
        ScaleState(scale=contrast.start, cur_hysteresis=getattr(rule, "delayed_shift", 0))
        for rule in (contrast.one, contrast.other)
    )
    level = {first: ""}
    seen = {first}
    for _ in range(depth):
        further: dict[tuple[ScaleState, ...], str] = {}
        for (one, other), letters in level.items():
            for overflow in EVENTS:
                pair = (contrast.one.after(one, overflow), contrast.other.after(other, overflow))
                reached = letters + "go"[overflow]
                if pair[0].scale != pair[1].scale:
                    return reached, len(seen)
                if pair not in seen:
                    seen.add(pair)
                    further[pair] = reached
        level = further
    return "", len(seen)


def trace_of(contrast: Contrast, letters: str) -> Trace:
    """The witness as a trace of the first rule; its last step is where the other one differs."""
    shift = getattr(contrast.one, "delayed_shift", 0)
    state = ScaleState(scale=contrast.start, cur_hysteresis=shift)
    return trace_of_rule(f"witness_{contrast.name}", contrast.one, state, letters, contrast.says)


def trace_of_rule(name: str, rule: Rule, state: ScaleState, letters: str, differs: str) -> Trace:
    """A trace of the reference's rule.

    Args:
        name: of the trace.
        rule: that is run.
        state: before the first step.
        letters: the events, g or o.
        differs: who does otherwise in the last step, and how.
    """
    names = ("scale", *rule.remembers)
    start = {name: getattr(state, name) for name in names}
    steps: list[Step] = []
    for letter in letters:
        state = rule.after(replace(state, exhausted=0), letter == "o")
        raised = {"raised": bool(state.exhausted)} if isinstance(rule, DynamicRule) else {}
        steps.append({name: getattr(state, name) for name in names} | raised)
    header = Header(
        name=name,
        package="twinstep",
        version=VERSION,
        subject=f"twinstep.reference.loss_scale.{type(rule).__name__}",
        command=COMMAND,
        rule=KINDS[type(rule)],
        constants={f.name: getattr(rule, f.name) for f in fields(rule)},
        start=start,
        steps=letters,
        differs=differs,
    )
    return Trace(header=header, steps=steps)


def contrasts(
    depth: int, chosen: Sequence[Contrast] = CONTRASTS
) -> list[tuple[Contrast, str, int]]:
    """Each contrast with its witness and the pairs that were explored."""
    return [(contrast, *witness(contrast, depth)) for contrast in chosen]


def write_witnesses(found: Sequence[tuple[Contrast, str, int]]) -> list[Path]:
    """Write the witnesses of the rules that differ."""
    WITNESSES.mkdir(exist_ok=True)
    return [
        write(trace_of(contrast, letters), WITNESSES) for contrast, letters, _ in found if letters
    ]
