"""The gate: counts decide at once, times only after a second look by fresh processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstep.benchmarks.beside.statistics import Ratio, rate_at_most
from twinstep.benchmarks.regressions.growth import Counts, Growth, growths
from twinstep.benchmarks.regressions.pairs import CONFIRMED, Look, Plan, Told, look
from twinstep.benchmarks.regressions.sides import Checkout, asked, started


@dataclass(frozen=True)
class Slower:
    """A row whose time grew in both looks."""

    label: str
    ratio: Ratio
    seconds: float
    place: str = ""

    def __str__(self) -> str:
        """What became slower, and by how much."""
        share, low = self.ratio.middle - 1.0, self.ratio.low - 1.0
        return (
            f"{self.label}: time grew by {share:.1%}, at least {low:.1%} with 99.5 % confidence, "
            f"from {1e3 * self.seconds:.4g} ms, in two looks by fresh processes"
        )


@dataclass
class Verdict:
    """Everything that the gate found.

    Attributes:
        growths: of counts.
        slower: of times.
        looks: of the first look, by row.
        unconfirmed: rows that looked slower once, and not again.
        false_alarms: of the control: the baseline called slower than itself.
        controls: how often the control was judged.
        counts: of baseline and candidate.
        uncounted: what could not be counted on either side.
    """

    growths: list[Growth] = field(default_factory=list)
    slower: list[Slower] = field(default_factory=list)
    looks: dict[str, Look] = field(default_factory=dict)
    unconfirmed: list[str] = field(default_factory=list)
    false_alarms: int = 0
    controls: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    uncounted: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[Growth | Slower]:
        """Costs that fail the gate."""
        return [*self.growths, *self.slower]

    @property
    def compared(self) -> bool:
        """True if anything was counted or timed on both sides."""
        timed = any(not row.problem for row in self.looks.values())
        return timed or any(one["facts"] for one in self.counts.get("candidate", {}).values())

    @property
    def control(self) -> str:
        """The measured rate of false alarms, as a sentence."""
        rate = rate_at_most(self.false_alarms, self.controls)
        return (
            f"A/A: the baseline against itself was called slower in {self.false_alarms} of "
            f"{self.controls} first looks (a rate of at most {rate:.1%}, 95 %); "
            f"a failure takes two looks"
        )


def judge_counts(
    verdict: Verdict,
    baseline: Checkout,
    candidate: Checkout,
    operations: Sequence[str],
    accepted: Sequence[str],
) -> None:
    """Enter what grew among counts into the verdict."""
    with started([baseline, candidate]) as sides:
        found = asked(sides, "counts", operations=list(operations))
    before, after = (one["counts"] for one in found)
    verdict.counts = {"baseline": before, "candidate": after}
    verdict.growths = growths(before, after, accepted)
    verdict.uncounted = {label: one["missing"] for label, one in after.items() if one["missing"]}


def judge_times(
    verdict: Verdict,
    baseline: Checkout,
    candidate: Checkout,
    plan: Plan,
    operations: Sequence[str],
    told: Told,
) -> None:
    """Enter what became slower into the verdict: suspects of one look, confirmed by another."""
    verdict.looks = look(baseline, candidate, plan, told, operations)
    done = {label: row for label, row in verdict.looks.items() if not row.problem}
    verdict.controls = len(done)
    verdict.false_alarms = sum(row.control().above(plan.effect) for row in done.values())
    suspects = [label for label, row in done.items() if row.ratio().above(plan.effect)]
    if not suspects:
        return
    again = look(baseline, candidate, plan.second, told, labels=suspects)
    for label, row in again.items():
        ratio = row.ratio(CONFIRMED) if not row.problem else None
        if ratio is not None and ratio.above(plan.effect):
            verdict.slower.append(Slower(label, ratio, row.seconds[0], placed(verdict, label)))
        else:
            verdict.unconfirmed.append(label)


def placed(verdict: Verdict, label: str) -> str:
    """File and line of a timed kernel, where its counts have them."""
    name = label.split(" ")[0]
    rows = verdict.counts.get("candidate", {}).items()
    return next((one["place"] for other, one in rows if other.split(" ")[0] == name), "")
