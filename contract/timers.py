"""Timers by phase of a step: what an optimizer asks of them, and some that never wait.

On a GPU a span lies between two events in the current stream. Events are looked at later, and only
those that the device has passed are counted: a mean is of the spans that are over by then. While a
CUDA graph is captured nothing is timed, since its replays run no host code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch

LOG = logging.getLogger(__name__)


class Timer(Protocol):
    """A timer of one phase."""

    def start(self) -> None:
        """Begin a phase."""

    def stop(self) -> None:
        """End it."""


class Timers(Protocol):
    """Timers by name, and a report of some of them."""

    def __call__(self, name: str) -> Timer:
        """The timer of that name."""

    def log(self, names: list[str]) -> None:
        """Report these."""


class Event(Protocol):
    """The used part of `torch.cuda.Event`."""

    def record(self) -> None:
        """Put the event after what is in the current stream."""

    def query(self) -> bool:
        """True once the device has passed it; does not wait."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from here to another event that has been passed, too."""


class PhaseTimer:
    """Times spans between `start` and `stop`.

    Args:
        make_event: a new event that records times; None times on the clock of the host.
        capturing: True while nothing is to be timed.

    Attributes:
        total: milliseconds of all spans that are known to be over.
        count: how many these are.
    """

    def __init__(
        self,
        make_event: Callable[[], Event] | None,
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.total, self.count = 0.0, 0
        self._make, self._capturing = make_event, capturing
        self._began: float | Event | None = None
        self._open: list[tuple[Event, Event]] = []
        self._free: list[Event] = []

    def start(self) -> None:
        """Begin a span."""
        self.collect()
        self._began = None
        if self._capturing():
            return
        self._began = time.perf_counter() if self._make is None else self._recorded()

    def stop(self) -> None:
        """End the span, if one has begun."""
        began, self._began = self._began, None
        if isinstance(began, float):
            self.total += 1000.0 * (time.perf_counter() - began)
            self.count += 1
        elif began is not None and not self._capturing():
            self._open.append((began, self._recorded()))

    def collect(self) -> None:
        """Count the spans that the device has passed; does not wait."""
        while self._open and self._open[0][1].query():
            start, end = self._open.pop(0)
            self.total += start.elapsed_time(end)
            self.count += 1
            self._free += [start, end]

    def _recorded(self) -> Event:
        assert self._make is not None
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event


class PhaseTimers:
    """Timers by name, for the `timers` of an optimizer.

    Args:
        device: of the optimizer. Without a GPU the clock of the host is read.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._timers: dict[str, PhaseTimer] = {}

    def __call__(self, name: str) -> PhaseTimer:
        """Return the timer of that name; new where there is none."""
        known = self._timers.get(name)
        if known is None:
            capturing = torch.cuda.is_current_stream_capturing
            known = PhaseTimer(_event, capturing) if self._on_gpu else PhaseTimer(None)
            self._timers[name] = known
        return known

    def milliseconds(self, name: str) -> float:
        """Return the mean of the spans that are over by now, NaN if none is; does not wait."""
        timer = self(name)
        timer.collect()
        return timer.total / timer.count if timer.count else float("nan")

    def log(self, names: Sequence[str]) -> None:
        """Log the means of these, in milliseconds."""
        means = [f"{name} {self.milliseconds(name):.3f}" for name in names]
        LOG.info("milliseconds: %s", "; ".join(means))


def _event() -> Event:
    return cast(Event, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
