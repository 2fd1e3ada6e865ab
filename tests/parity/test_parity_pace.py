"""Time that a process is charged with: work and waiting, nothing that a busy machine takes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from twinstep.parity.records.errors import KernelDied
from twinstep.parity.runner.calls import limits, pace
from twinstep.parity.runner.calls.limits import Output, Watch
from twinstep.parity.runner.calls.pace import Pace, Thread

OWN, CHILD = 100, 200


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, Thread]:
    """Work and queue of one thread of each process; the clock goes on by ten seconds a look."""
    found: dict[int, Thread] = {OWN: (5.0, 5.0, False), CHILD: (50.0, 0.0, False)}
    clock = iter(range(0, 1000, 10))

    def seen(processes: Sequence[int]) -> Iterator[tuple[str, Thread]]:
        yield from ((str(process), found[process]) for process in processes)

    monkeypatch.setattr(pace, "_threads", seen)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    return found


def test_who_has_no_core_neither_works_nor_waits(threads: dict[int, Thread]) -> None:
    one = Pace(OWN)
    for look in range(1, 20):
        threads[OWN] = (5.0 + 0.1 * look, 5.0 + 9.9 * look, False)
        one.look([])
    assert one.ran == pytest.approx(1.9)
    assert one.waited == pytest.approx(0.0)
    assert one.too_much(2.0, 1.0) == ""


def test_a_long_time_in_the_queue_is_no_waiting_before_it_is_over(
    threads: dict[int, Thread],
) -> None:
    one = Pace(OWN)
    threads[OWN] = (5.0, 5.0, True)
    for _ in range(5):
        one.look([])
    assert one.waited == 0.0


def test_who_waits_for_a_compiler_that_has_no_core_does_not_wait(
    threads: dict[int, Thread],
) -> None:
    one = Pace(OWN)
    for look in range(1, 20):
        threads[CHILD] = (50.0 + 1.0 * look, 9.0 * look, False)
        one.look([CHILD])
    # The first look does not know how old the child is.
    assert one.waited <= 10.0
    assert one.ran <= 10.0 + 18.0


def test_who_sleeps_waits_and_who_loops_works(threads: dict[int, Thread]) -> None:
    one = Pace(OWN)
    one.look([])
    assert one.too_much(5.0, 10.0) == "10 s of waiting"
    threads[OWN] = (15.0, 5.0, False)
    one.look([])
    assert one.too_much(5.0, 20.0) == "5 s of work"


def test_a_real_process_is_charged_with_what_it_does() -> None:
    sleeps, loops = (
        subprocess.Popen([sys.executable, "-S", "-c", text])
        for text in ("import time; time.sleep(60)", "while True: pass")
    )
    try:
        found = [Pace(process.pid) for process in (sleeps, loops)]
        time.sleep(2.0)
        for one in found:
            one.look()
        assert found[0].waited > found[0].ran
        assert found[1].waited < 0.5
        assert found[1].ran > 0.0
    finally:
        for process in (sleeps, loops):
            process.kill()
            process.wait()


def looked_at_for_ever(watch: Watch) -> None:
    while True:
        watch.look(Output(), printing=False)
        time.sleep(0.01)


def test_a_request_that_waits_is_ended_by_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECOND", 0.05)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as one:
        watch = Watch(one.pid, 0.2)
        with pytest.raises(KernelDied, match=r"hangs: no return after 0.4 s of waiting"):
            looked_at_for_ever(watch)
        one.kill()
