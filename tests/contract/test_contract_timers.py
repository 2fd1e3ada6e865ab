"""Timers of both sides: called by phase, alike in use, and never waiting on the fast side."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import started
from twinstep.contract.timers import PhaseTimer, PhaseTimers


class Clock:
    """Timers that write down what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, name: str) -> Clock:
        """Remember a name."""
        self.name = name
        return self

    def start(self) -> None:
        """Note a start."""
        self.said.append(f"start {self.name}")

    def stop(self) -> None:
        """Note a stop."""
        self.said.append(f"stop {self.name}")

    def log(self, names: list[str]) -> None:
        """Note a report."""
        self.said.append(f"log {', '.join(names)}")


def spans(*names: str) -> list[str]:
    return [f"{act} {name}" for name in names for act in ("start", "stop")]


@pytest.mark.usefixtures("replay")
def test_the_fast_flat_optimizer_times_what_its_docstring_says() -> None:
    clock = Clock()
    run = started("fast", "flat", timers=clock)
    run.train(range(2), at=(1,))
    # Whether a step is skipped the host does not know, and does not ask.
    step = [*spans("compute_norm", "basic_step"), "log compute_norm, basic_step"]
    assert clock.said == step * 2


TORCH = ["compute_norm", "unscale_and_clip", "basic_step", "update_fp16"]
CHECKED = ["overflow_check", *TORCH]
LOGGED = ["compute_norm", "overflow_check", *TORCH[1:]]


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize(
    ("side", "names", "logged", "skipped", "then"),
    [
        ("fast", TORCH, TORCH, TORCH[:1], TORCH),
        ("reference", CHECKED, LOGGED, CHECKED[:2], LOGGED[:2]),
    ],
    ids=["fast", "reference"],
)
def test_around_another_class_every_phase_of_torch_is_timed(
    side: str, names: list[str], logged: list[str], skipped: list[str], then: list[str]
) -> None:
    clock = Clock()
    run = started(side, "flat", torch.optim.AdamW, timers=clock)
    run.train(range(2), at=(1,))
    first = [*spans(*names), f"log {', '.join(logged)}"]
    assert clock.said == [*first, *spans(*skipped), f"log {', '.join(then)}"]


class Event:
    """An event of a device that gets along only when it is told to."""

    made = 0
    passed = 0.0
    now = 0.0

    def __init__(self) -> None:
        Event.made += 1

    def record(self) -> None:
        """Take a place in the stream."""
        Event.now += 1.0
        self.at = Event.now

    def query(self) -> bool:
        """True if the device came here."""
        return self.at <= Event.passed

    def elapsed_time(self, end_event: Any) -> float:
        """Time between two that were passed."""
        assert self.query(), "asked before it was over"
        assert end_event.query(), "asked before it was over"
        return float(end_event.at - self.at)

    def synchronize(self) -> None:
        """Never."""
        raise AssertionError("waits for the device")


def test_spans_count_once_the_device_has_passed_them() -> None:
    Event.made, Event.passed, Event.now = 0, 0.0, 0.0
    timer = PhaseTimer(Event)
    for _ in range(3):
        timer.start()
        timer.stop()
    timer.collect()
    assert (timer.count, timer.total) == (0, 0.0)
    Event.passed = 4.0
    timer.collect()
    assert (timer.count, timer.total) == (2, 2.0)
    timer.start()
    timer.stop()
    assert Event.made == 6, "events that were counted are used again"
    Event.passed = 99.0
    timer.collect()
    assert (timer.count, timer.total) == (4, 4.0)


def test_nothing_is_timed_while_a_graph_is_captured() -> None:
    Event.made = 0
    timer = PhaseTimer(Event, lambda: True)
    timer.start()
    timer.stop()
    assert Event.made == 0
    assert timer.count == 0


def test_timers_on_the_host_add_up(caplog: pytest.LogCaptureFixture) -> None:
    timers = PhaseTimers()
    timers("a").stop()
    assert math.isnan(timers.milliseconds("a"))
    for _ in range(2):
        timers("a").start()
        timers("a").stop()
    assert timers("a").count == 2
    assert 0.0 <= timers.milliseconds("a") < 1000.0
    with caplog.at_level("INFO"):
        timers.log(["a", "b"])
    assert "a" in caplog.text
    assert "nan" in caplog.text


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("side", ["fast", "reference"])
def test_a_phase_that_fails_has_ended(side: str) -> None:
    clock = Clock()
    run = started(side, "flat", torch.optim.AdamW, timers=clock)

    def fails() -> None:
        raise RuntimeError("inside")

    run.optimizer.optimizer.step = fails
    run.params[0].grad = torch.ones_like(run.params[0])
    with pytest.raises(RuntimeError, match="inside"):
        run.optimizer.step()
    assert clock.said[-1] == "stop basic_step"


@pytest.mark.gpu
def test_spans_on_a_gpu_are_of_the_device() -> None:
    timers = PhaseTimers("cuda")
    with torch.cuda.device(0):
        timers("sleep").start()
        torch.cuda._sleep(10_000_000)
        timers("sleep").stop()
        assert math.isnan(timers.milliseconds("sleep")), "the host waited"
        torch.cuda.synchronize()
        assert timers.milliseconds("sleep") > 1.0
