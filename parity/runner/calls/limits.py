"""Limits of one request to a kernel's process, and what the process prints meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from twinstep.parity.records.errors import KernelDied
from twinstep.parity.runner.calls.invoke import PATIENCE
from twinstep.parity.runner.calls.pace import Pace
from twinstep.parity.runner.calls.places import is_library
from twinstep.parity.runner.calls.processes import descendants

TICK = 0.05
# Between two looks at all processes of the machine.
SECOND = 1.0
# The process's own limit comes first; this is for one that swallows it or never reaches Python.
GRACE = 3.0
MEMORY_SHARE = 0.6
PROCESSES = 100
PRINTED = 1 << 24
SHOWN = 2_000


@dataclass
class Output:
    """Output of a process: its beginning, its end, and its size."""

    first: bytes = b""
    last: bytes = b""
    size: int = 0

    def add(self, data: bytes) -> None:
        """Take more of it."""
        self.size += len(data)
        room = SHOWN - len(self.first)
        self.first += data[:room]
        self.last = (self.last + data[max(room, 0) :])[-SHOWN:]

    def text(self) -> str:
        """The beginning and the end."""
        left_out = self.size - len(self.first) - len(self.last)
        middle = f"\n... {left_out} bytes more ...\n".encode() if left_out else b""
        return (self.first + middle + self.last).decode(errors="replace")


def traced(output: Output) -> str:
    """The innermost line of the user's in what `faulthandler` has printed, in brackets."""
    lines = [line.strip() for line in output.text().splitlines()]
    frames = [line.split('"') for line in lines if line.startswith('File "')]
    known = [(parts[1], parts[2].partition("line ")[2].partition(" ")[0]) for parts in frames]
    users = [place for place in known if not is_library(place[0])]
    return f" [{users[0][0]}:{users[0][1]}]" if users else ""


@dataclass
class Watch:
    """Limits of one request: time, memory, processes, and what is printed.

    Attributes:
        process: its number.
        seconds: of work that it may take, `PATIENCE` times as many with what it has started, and
            as many of waiting.
    """

    process: int
    seconds: float

    def __post_init__(self) -> None:
        self._looked = self._counted = time.monotonic()
        self._pace: Pace | None = None
        self._room = MEMORY_SHARE * available()

    def look(self, output: Output, printing: bool) -> None:
        """Compare with the limits, at most every `TICK` seconds.

        Args:
            output: of the process so far.
            printing: there was some of it a moment ago: such a process waits for its reader.

        Raises:
            KernelDied: one is exceeded; the process is still there.
        """
        now = time.monotonic()
        if output.size > PRINTED:
            raise KernelDied("output", f"prints without end: {output.size >> 20} MiB")
        if printing or now - self._looked < TICK:
            return
        self._looked = now
        size = resident(self.process)
        if size > self._room:
            raise KernelDied("memory", f"takes {size / 2**30:.1f} GiB of memory")
        if now - self._counted >= SECOND:
            self._counted = now
            self._count()

    def _count(self) -> None:
        """Look at the process, and at all that it has started."""
        below = descendants(self.process)
        if len(below) > PROCESSES:
            raise KernelDied("processes", f"starts processes without end: {len(below)} are running")
        # Most calls end before there is anything to measure.
        self._pace = self._pace or Pace(self.process)
        self._pace.look(below)
        patience = PATIENCE * self.seconds
        spent = self._pace.too_much(patience + GRACE, patience)
        if spent:
            raise KernelDied("hang", f"hangs: no return after {spent}")


def resident(process: int) -> int:
    """Bytes of memory that a process has of its own."""
    with contextlib.suppress(OSError):
        rows = Path(f"/proc/{process}/statm").read_text().split()
        return (int(rows[1]) - int(rows[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0


def available() -> int:
    """Bytes of memory that this machine could still give."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62
