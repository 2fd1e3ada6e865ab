"""Times of two checkouts in pairs: three processes take turns, the third repeats the first.

Each look has several sets of fresh processes, since where memory lies differs between processes
more than between turns. A row is suspect if the whole interval of candidate over baseline lies
above the minimum effect. The third process is a second one of the baseline: judged by the same
rule, it shows how often a first look is wrong on this machine, now. A suspect is looked at again
by twice as many fresh processes, with a wider interval.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twinstep.benchmarks.beside.statistics import Ratio, of_process, over_processes
from twinstep.benchmarks.regressions.sides import Checkout, Process, SideFailed, asked, started

SUSPECT, CONFIRMED = 0.975, 0.995  # each tail: intervals of 95 % and 99 %
AGAIN = 2  # times the sets of the first look
SHARED, DEDICATED = 0.05, 0.02  # minimum effect on a shared machine, and on a GPU of one's own
SHAPES = ((1, 2**20), (300, 256))
ORDERS = tuple(itertools.permutations(range(3)))  # baseline, candidate, baseline again
Answers = tuple[float, float, float]
Told = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """Size of a look.

    Attributes:
        sets: of fresh processes.
        rounds: in which each of the three has a turn.
        effect: least slowdown that is reported.
        threads: of torch in each process; 0 for its own choice.
    """

    sets: int = 4
    rounds: int = 12
    effect: float = SHARED
    threads: int = 1

    @property
    def second(self) -> Plan:
        """The second look."""
        return replace(self, sets=AGAIN * self.sets)


@dataclass
class Look:
    """Answers of all sets for one row.

    Attributes:
        seconds: of the baseline, the medians of each set.
        ratios: candidate over baseline.
        controls: baseline over itself.
        problem: why the row could not be timed on both sides.
    """

    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)
    problem: str = ""

    def add(self, turns: Sequence[Sequence[float]]) -> None:
        """Enter the turns of a set: of baseline, candidate, and baseline again."""
        first, candidate, again = turns
        base = [math.sqrt(a * b) for a, b in zip(first, again, strict=True)]
        self.seconds.append(statistics.median(base))
        self.ratios.append(of_process(candidate, base))
        self.controls.append(of_process(again, first))

    def ratio(self, confidence: float = SUSPECT) -> Ratio:
        """Candidate over baseline."""
        return over_processes(self.ratios, confidence)

    def control(self) -> Ratio:
        """Baseline over itself."""
        return over_processes(self.controls, SUSPECT)


def look(
    baseline: Checkout,
    candidate: Checkout,
    plan: Plan,
    told: Told,
    operations: Sequence[str] = (),
    labels: Sequence[str] | None = None,
) -> dict[str, Look]:
    """Time rows in sets of fresh processes.

    Args:
        baseline: what is compared with.
        candidate: what is compared.
        plan: how often.
        told: is called with the name of what is being timed.
        operations: whose rows are timed; without them all, and our classes.
        labels: the rows; None for all that both sides can time.
    """
    found: dict[str, Look] = {}
    for number in range(plan.sets):
        places = [baseline, candidate, baseline]
        # Which starts first is turned, too.
        order = ORDERS[number % len(ORDERS)]
        with started([places[at] for at in order], plan.threads) as sides:
            three = [sides[order.index(at)] for at in range(3)]
            chosen = common(three, operations) if labels is None else labels
            for label in chosen:
                told(f"set {number + 1} of {plan.sets}, {label}")
                row = found.setdefault(label, Look())
                if row.problem:
                    continue
                try:
                    row.add(turns(three, label, plan.rounds))
                except SideFailed as failure:
                    row.problem = str(failure)
    return found


def common(sides: Sequence[Process], operations: Sequence[str]) -> list[str]:
    """Rows that both checkouts have."""
    both = asked(sides[:2], "times", shapes=SHAPES, operations=list(operations))
    first, second = (one["labels"] for one in both)
    return [label for label in first if label in second]


def turns(sides: Sequence[Process], label: str, rounds: int) -> list[list[float]]:
    """Seconds of a row in every round, of each side."""
    opened = asked(sides, "open", label=label)
    repeats = max(1, round(statistics.median(one["repeats"] for one in opened)))
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        for at in ORDERS[number % len(ORDERS)]:
            found[at].append(sides[at].ask("turn", repeats=repeats)["seconds"])
    asked(sides, "close")
    return found
