"""Time of a process: of work, and of waiting for something that none of its processes works on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.parity.runner.calls.processes import descendants

Thread = tuple[float, float, bool]
"""Seconds of work, and ready to work without a core; whether it is ready now, or reads a disk."""


@dataclass
class Pace:
    """Seconds of a process and of all that it has started, between the first look and the last.

    Neither counts what a busy machine takes: who is ready to work, and has no core, does not wait.

    Attributes:
        process: its number.
        ran: in which one of their threads ran, the busiest at each look.
        waited: in which none ran or was ready to.
    """

    process: int
    ran: float = 0.0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self._clock, self._seen = time.monotonic(), dict(_threads([self.process]))

    def look(self, below: Sequence[int] | None = None) -> None:
        """Count what has passed since the last look.

        Args:
            below: the processes that it has started, where they are known.
        """
        below = descendants(self.process) if below is None else below
        clock, seen = time.monotonic(), dict(_threads([self.process, *below]))
        passed = clock - self._clock
        ran = queued = 0.0
        for thread, (work, queue, _) in seen.items():
            before = self._seen.get(thread, (0.0, 0.0, False))
            # A process that is seen for the first time may be older than the last look.
            worked, stood = min(work - before[0], passed), min(queue - before[1], passed)
            if worked + stood > ran + queued:
                ran, queued = worked, stood
        self.ran += ran
        # The system counts the time in a queue when it is over.
        if not any(ready for *_, ready in seen.values()):
            self.waited += max(0.0, passed - ran - queued)
        self._clock, self._seen = clock, seen

    def too_much(self, work: float, waiting: float) -> str:
        """Words for more than these seconds; empty if it is not."""
        if self.ran >= work:
            return f"{work:g} s of work"
        return f"{waiting:g} s of waiting" if self.waited >= waiting else ""


def _threads(processes: Sequence[int]) -> Iterator[tuple[str, Thread]]:
    """Each thread of some processes."""
    for process in processes:
        # One that ends meanwhile has no more to count.
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{process}/task"):
                own = Path(f"/proc/{process}/task/{thread}")
                work, queued, _ = (own / "schedstat").read_text().split()
                state = (own / "stat").read_text().rpartition(")")[2].split()[0]
                yield thread, (int(work) / 1e9, int(queued) / 1e9, state in ("R", "D"))
