"""Counts of two checkouts compared: every cost that grew, in one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from twinstep.parity.proof.gates.compile.artefacts import FLOORS

Counts = Mapping[str, Mapping[str, Any]]  # label -> place, facts, missing
FALLS = tuple(f"machine code, {name}" for name in FLOORS)
# A line more in a launcher is no news; a line more for every tensor is. Where memory lies decides
# over a hundred instructions of a call in C++.
SLACK = {
    "host bytecodes": (20, 0.02),
    "host bytecodes per tensor": (0.5, 0.0),
    "machine instructions executed": (200, 0.02),
}


@dataclass(frozen=True)
class Growth:
    """A cost that grew.

    Attributes:
        label: of the call, class or compiled kernel.
        fact: what was counted.
        before, after: how many.
        place: file and line, where known.
        problem: a sentence instead, where it can no longer be counted.
    """

    label: str
    fact: str
    before: float
    after: float
    place: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """What grew, and by how much."""
        if self.problem:
            return f"{self.label}: {self.problem}"
        verb = "fell" if self.fact in FALLS else "grew"
        share = f" ({self.after / self.before - 1.0:+.1%})" if self.before else ""
        return f"{self.label}: {self.fact} {verb} from {number(self.before)} to " + (
            f"{number(self.after)}{share}"
        )


def number(value: float) -> str:
    """A count for a sentence.

    >>> number(1234567), number(2.25), number(3.0)
    ('1,234,567', '2.25', '3')
    """
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def growths(before: Counts, after: Counts, accepted: Sequence[str] = ()) -> list[Growth]:
    """Costs that grew and are not accepted.

    Args:
        before: counts of the baseline.
        after: counts of the candidate.
        accepted: patterns of `label: fact`, as `triton.adamw_step*: bytes*`.
    """
    return [
        one
        for one in _all(before, after)
        if not any(fnmatch(f"{one.label}: {one.fact}", pattern) for pattern in accepted)
    ]


def _all(before: Counts, after: Counts) -> Iterator[Growth]:
    for label, counted in after.items():
        known = before.get(label)
        place = counted.get("place", "")
        if known is not None and counted["missing"] and not known["missing"]:
            reason = f"can no longer be counted: {counted['missing']}"
            yield Growth(label, "", 0, 0, place, reason)
            continue
        base = known["facts"] if known is not None else _nearest(label, before)
        for fact, count in counted["facts"].items():
            if fact in base and grew(fact, base[fact], count):
                yield Growth(label, fact, base[fact], count, place)


def grew(fact: str, before: float, after: float) -> bool:
    """True if a cost grew by more than its slack, which most do not have.

    >>> grew("launches", 2, 3), grew("host bytecodes", 5000, 5050)
    (True, False)
    """
    if fact in FALLS:
        return after < before
    fixed, share = SLACK.get(fact, (0.0, 0.0))
    return after > before + max(fixed, share * before)


def _nearest(label: str, before: Counts) -> dict[str, float]:
    """Worst counts of the variants of the same kernel: a variant may be new by name alone."""
    name, _, rest = label.partition(" ")
    target = rest.rpartition(" ")[2]
    found: dict[str, float] = {}
    for other, counted in before.items():
        words = other.split(" ")
        if (words[0], words[-1]) != (name, target):
            continue
        for fact, count in counted["facts"].items():
            worst = min if fact in FALLS else max
            found[fact] = worst(found.get(fact, count), count)
    return found
