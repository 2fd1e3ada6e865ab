"""A budget of seconds: what it buys first, and that what it cuts is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from twinstep.benchmarks.beside.rows import Group
from twinstep.benchmarks.beside.subject import Shape
from twinstep.benchmarks.regressions.sides import SideFailed
from twinstep.benchmarks.runs import budget
from twinstep.benchmarks.runs.budget import Plan, Spent, spend

TABLE = [Group("adamw_step", "bf16", Shape(1, 1000)), Group("norm", "bf16", Shape(1, 1000))]
ONCE = [Group("norm", "bf16", Shape(1, 10**4)), Group("norm", "bf16", Shape(1, 10**6))]
START = 1.0  # seconds until a process answers
BUILD = 50.0  # seconds in which a peer is built


class Clock:
    """A clock that only the fake processes move, and the groups that they timed."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, list[list[object]]()

    def ask(self, do: str, group: list[object] | None = None, rounds: int = 0) -> dict[str, object]:
        """Take a second for each thousand elements; what is built before takes no budget."""
        if do == "prepare":
            self.now += BUILD
            return {}
        assert (do, rounds) == ("beside", 15)
        assert group is not None
        self.asked.append(group)
        if group[0] == "broken":
            raise SideFailed("it broke")
        self.now += int(str(group[3])) / 1000
        return {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of every process, which takes `START` to begin."""
    clock = Clock()

    @contextmanager
    def process(_: object) -> Iterator[Clock]:
        clock.now += START
        yield clock

    monkeypatch.setattr(budget, "Process", process)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def spent(seconds: float, wide: bool = False, table: list[Group] = TABLE) -> Spent:
    """All that so many seconds buy."""

    def is_wide(_: Group, given: Sequence[object]) -> bool:
        assert given, "what was not timed has no interval"
        return wide

    return spend(table, ONCE, "", Plan(budget=seconds), lambda _: None, is_wide)


def counts(found: Spent) -> list[int]:
    """Processes that timed each group."""
    return [len(given) for given in found.of.values()]


@pytest.mark.usefixtures("clock")
def test_with_time_enough_all_is_timed_and_wide_rows_more_often() -> None:
    assert counts(spent(3000.0)) == [3, 3, 1, 1]
    assert counts(spent(3000.0, wide=True)) == [5, 5, 1, 1]
    assert counts(spent(0.0)) == [5, 5, 1, 1]
    assert spent(3000.0).cut == []


def test_what_does_not_fit_is_named_and_the_budget_kept(clock: Clock) -> None:
    found = spent(100.0)
    assert counts(found) == [3, 3, 1, 0]
    assert found.cut == ["norm bf16 1,000,000: cut by the budget"]
    assert found.taken == clock.now - START - BUILD <= 100.0


@pytest.mark.usefixtures("clock")
def test_one_process_alone_is_named() -> None:
    (slow,) = table = [Group("norm", "bf16", Shape(1, 6000))]
    found = spent(10.0, table=table)
    assert counts(found)[0] == 1
    assert f"{slow}: one process alone, so no interval" in found.cut


@pytest.mark.usefixtures("clock")
def test_nothing_is_silent_whatever_the_budget() -> None:
    for seconds in (0.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1500.0):
        found = spent(seconds)
        for group, given in found.of.items():
            assert given or f"{group}: cut by the budget" in found.cut


@pytest.mark.usefixtures("clock")
def test_what_fails_is_a_problem_and_no_cut() -> None:
    broken = Group("broken", "bf16", Shape(1, 1))
    found = spent(3000.0, table=[broken])
    assert found.problems == [f"{broken}: it broke"] * 3
    assert found.cut == []


def test_what_is_not_known_is_expected_by_the_most_similar() -> None:
    found = Spent({})
    assert found.expected(TABLE[0]) == budget.UNKNOWN
    found.seconds = {Group("sum", "fp32", Shape(1, 2**24)): 4.0}
    # Many small tensors are not a multiple of one large one, nor the other way round.
    assert 1.0 < found.expected(Group("sum", "fp32", Shape(1000, 64))) < 4.0
    assert 3.0 < found.expected(Group("sum", "fp32", Shape(200, 2**16))) < 4.0
    found.seconds[Group("sum", "fp32", Shape(10_000, 64))] = 20.0
    assert found.expected(Group("sum", "fp32", Shape(100_000, 64))) == pytest.approx(
        20.0 * 10**budget.GROWTH
    )
    assert found.expected(Group("sum", "fp16", Shape(1, 1))) == budget.UNKNOWN
