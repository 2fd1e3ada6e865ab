"""Timers by phase of a step, on the clock of the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

LOG = logging.getLogger(__name__)


class PhaseTimer:
    """Adds up the time between `start` and `stop`, in seconds.

    Attributes:
        seconds: of all finished spans.
        count: how many these are.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        self._started: float | None = None

    def start(self) -> None:
        """Begin a span; one that had begun is forgotten."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End the span, if one has begun."""
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self.count += 1
        self._started = None


class PhaseTimers:
    """Timers by name, for the `timers` of an optimizer.

    They measure what the host does. On a GPU that is how long launching takes, unless the phase
    waits for the device itself; `fast.timers` measures the device.
    """

    def __init__(self) -> None:
        self._timers: dict[str, PhaseTimer] = {}

    def __call__(self, name: str) -> PhaseTimer:
        """The timer of that name, made when it is first asked for."""
        return self._timers.setdefault(name, PhaseTimer())

    def milliseconds(self, name: str) -> float:
        """Mean of all finished spans; NaN before the first."""
        timer = self(name)
        return 1000.0 * timer.seconds / timer.count if timer.count else float("nan")

    def log(self, names: Sequence[str]) -> None:
        """Log the means of these, in milliseconds."""
        LOG.info(", ".join(f"{name}: {self.milliseconds(name):.3f} ms" for name in names))
