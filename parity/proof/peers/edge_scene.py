"""Demonstration of an edge: the same scene for DeepSpeed, for ours, and for `Compat`.

Each number is small enough to be checked by hand, and what is right is written beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinstep.contract.compat import Compat

Numbers = list[float]
DIGITS = 5
# Runs DeepSpeed, and the reference.
Play = tuple[Callable[[], Numbers], Callable[[Compat], Numbers]]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One edge: a row of `scenes.toml` and what runs it.

    Attributes:
        edge: its id in the edge table.
        setting: what is run, in a few words.
        shows: what the numbers are.
        right: what they should be.
        upstream: runs DeepSpeed.
        ours: runs the reference.
        field: of `Compat`, which brings upstream's numbers back; empty where none does.
        compiles: whether DeepSpeed compiles C++ for it.
    """

    edge: str
    setting: str
    shows: str
    right: Sequence[float]
    upstream: Callable[[], Numbers]
    ours: Callable[[Compat], Numbers]
    field: str = ""
    compiles: bool = False


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Results of one scene; numbers have five significant digits.

    Attributes:
        edge: its id.
        upstream: DeepSpeed's numbers.
        default: ours.
        compat: ours with `Compat.deepspeed()`.
        missing: why nothing was run here; empty where it was.
    """

    edge: str
    upstream: Numbers = field(default_factory=list)
    default: Numbers = field(default_factory=list)
    compat: Numbers = field(default_factory=list)
    missing: str = ""


def shown(scene: Scene, missing: str = "") -> Shown:
    """Run a scene on every side."""
    if missing:
        return Shown(edge=scene.edge, missing=missing)
    return Shown(
        edge=scene.edge,
        upstream=rounded(scene.upstream()),
        default=rounded(scene.ours(Compat())),
        compat=rounded(scene.ours(Compat.deepspeed())),
    )


def rounded(numbers: Sequence[float]) -> Numbers:
    """Five significant digits, and no negative zero.

    >>> rounded([2 / 3, -0.0])
    [0.66667, 0.0]
    """
    return [float(f"{number:.{DIGITS}g}") + 0.0 for number in numbers]


def verdict(scene: Scene, seen: Shown) -> str:
    """Verdict of the numbers on DeepSpeed, in a few words."""
    if seen.missing:
        return f"not run: {seen.missing}"
    return "no longer so" if seen.upstream == rounded(scene.right) else "still so"


def faults(scene: Scene, seen: Shown, before: Shown | None) -> list[str]:
    """Contradictions in the numbers of a scene, one sentence each."""
    if seen.missing:
        return []
    found = []
    if seen.default != rounded(scene.right):
        found.append(f"{scene.edge}: ours gives {seen.default}, right is {list(scene.right)}")
    if scene.field and seen.compat != seen.upstream:
        found.append(
            f"{scene.edge}: Compat.deepspeed() gives {seen.compat}, DeepSpeed {seen.upstream}"
        )
    if before is not None and not before.missing and seen.upstream != before.upstream:
        found.append(
            f"{scene.edge}: DeepSpeed gives {seen.upstream}, on record is {before.upstream}"
        )
    return found
