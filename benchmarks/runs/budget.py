"""Fresh processes that time groups until a budget of seconds is spent.

Two processes time the whole table, so that every row has an interval; then come the groups that
are dear (curves, and groups of many tensors), once; then further processes, for the whole table
once more and after that only for groups whose intervals are wide. What does not fit into what is
left, by what it took before or by what its smaller neighbour took, is cut, and named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from twinstep.benchmarks.beside.rows import Group
from twinstep.benchmarks.regressions.sides import HERE, Checkout, Process, SideFailed

Answers = dict[str, Any]
Told = Callable[[str], object]
FIRM = 3  # processes that time the whole table, where the budget allows
UNKNOWN = 5.0  # seconds that a group takes of which nothing is known
PER_TENSOR = 1e4  # elements that take as long as a tensor more
SLACK = 1.3  # a group may take so much longer than before
GROWTH = 0.8  # exponent of its seconds over its effort: longer calls have fewer rounds


@dataclass(frozen=True)
class Plan:
    """Limits of a run.

    Attributes:
        processes: fresh ones, at most.
        rounds: of a group in each, at most.
        budget: seconds of all of it; 0 for no limit.
    """

    processes: int = 5
    rounds: int = 15
    budget: float = 0.0


@dataclass
class Spent:
    """Answers of all processes, and what they cost.

    Attributes:
        of: answers by group.
        cut: what the budget left out, in sentences.
        problems: what failed.
        taken: seconds in all.
    """

    of: dict[Group, list[Answers]]
    cut: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    taken: float = 0.0
    seconds: dict[Group, float] = field(default_factory=dict)
    begun: float = field(default_factory=lambda: time.perf_counter())

    def left(self, budget: float) -> float:
        """Seconds that are left of a budget."""
        self.taken = time.perf_counter() - self.begun
        return budget - self.taken if budget else float("inf")

    def expected(self, group: Group) -> float:
        """Seconds that a group will take: as before, or by those of the most similar one."""
        if group in self.seconds:
            return self.seconds[group]
        size = effort(group)
        alike = [
            (abs(math.log(size / effort(own))), taken * (size / effort(own)) ** GROWTH)
            for own, taken in self.seconds.items()
            if (own.operation, own.dtype) == (group.operation, group.dtype)
        ]
        return min(alike, default=(0.0, UNKNOWN))[1]


def effort(group: Group) -> float:
    """A measure of what a group takes: small tensors cost the host, large ones memory."""
    return group.shape.tensors + group.shape.numel / PER_TENSOR


def spend(
    table: Sequence[Group],
    once: Sequence[Group],
    file: str,
    plan: Plan,
    told: Told,
    wide: Callable[[Group, Sequence[Answers]], bool],
) -> Spent:
    """Time groups until all processes have run, or the budget is spent.

    Args:
        table: groups of every process.
        once: groups that are timed once.
        file: of a user; empty for our kernels.
        plan: the limits.
        told: is called with what is being timed.
        wide: whether a group's intervals deserve another process.
    """
    spent = Spent({group: [] for group in (*table, *once)})
    for number in range(plan.processes):
        chosen = list(table)
        if number >= FIRM and plan.budget:
            chosen = [group for group in chosen if spent.of[group] and wide(group, spent.of[group])]
        if not chosen or spent.left(plan.budget) <= 0:
            break
        with Process(Checkout("this checkout", HERE, file)) as side:
            said = partial(_told, told, number)
            if not number:
                said("builds")
                side.ask("prepare")
                spent.begun = time.perf_counter()
            one_process(side, chosen, plan, spent, plan.budget, said)
            if number == min(1, plan.processes - 1):
                # The next process has to find time for the table again.
                kept = min(sum(spent.seconds.values()), spent.left(plan.budget) / 2)
                limit = plan.budget and plan.budget - kept * (number + 1 < plan.processes)
                one_process(side, once, plan, spent, limit, said)
    spent.left(plan.budget)
    spent.cut += [f"{group}: cut by the budget" for group in spent.of if group not in spent.seconds]
    few = [group for group in table if len(spent.of[group]) == 1 < plan.processes]
    spent.cut += [f"{group}: one process alone, so no interval" for group in few]
    return spent


def one_process(
    side: Process, groups: Sequence[Group], plan: Plan, spent: Spent, limit: float, told: Told
) -> None:
    """Time groups in one process, as far as the limit goes."""
    for group in groups:
        if SLACK * spent.expected(group) > spent.left(limit):
            continue
        told(str(group))
        begun = time.perf_counter()
        row = [group.operation, group.dtype, group.shape.tensors, group.shape.each]
        try:
            spent.of[group].append(side.ask("beside", group=row, rounds=plan.rounds))
        except SideFailed as failure:
            spent.problems.append(f"{group}: {failure}")
        spent.seconds[group] = time.perf_counter() - begun


def _told(told: Told, number: int, what: str) -> None:
    told(f"process {number + 1}, {what}")
