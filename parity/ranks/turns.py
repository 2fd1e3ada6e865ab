"""Turns of the ranks' threads: one runs at a time, and the next is drawn where it has to wait."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Awaited(Protocol):
    """A collective that a rank waits for, as far as turns go."""

    def arrived(self) -> bool:
        """True once it has failed, or needs no other rank any more."""

    def deliver(self) -> None:
        """Complete it, if it has arrived and has not failed."""

    def fail_for(self, lost: Mapping[int, str]) -> bool:
        """Fail if a rank that is missing there is lost, whose reason is given; else False."""

    def __str__(self) -> str: ...


class Abandoned(BaseException):
    """End of a rank's thread after the run. Not an `Exception`, so that no rank swallows it."""


class Turns:
    """Turns of the threads of one run.

    Whatever is drawn comes from one seed. All attributes change under the lock only.

    Attributes:
        lock: of everything that ranks share.
        lost: reason by rank that takes part in no more collectives.
        flying: what may be completed late, in the order of calls.
        failed: what has failed; a rank that never waits for it does not see it.
    """

    def __init__(self, count: int, seed: int, *, late: bool) -> None:
        self.lock = threading.RLock()
        self.lost: dict[int, str] = {}
        self.flying: list[Awaited] = []
        self.failed: list[Awaited] = []
        self._draw, self._late = random.Random(seed), late
        self._gates = [threading.Lock() for _ in range(count)]
        for gate in self._gates:
            gate.acquire()
        self._threads: dict[int, int] = {}
        self._ready = list(range(count))
        self._waiting: dict[int, Awaited] = {}
        self._stalled: dict[int, str] = {}
        self._running: int | None = None
        self._moved = time.monotonic()
        self._given_up: dict[int, str] = {}
        self._idle = threading.Event()
        self._over = False

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn, in its thread."""
        self._threads[rank] = threading.get_ident()
        self._pass_gate(rank)

    def end(self, rank: int, reason: str) -> None:
        """End a rank; all that waits for it fails."""
        with self.lock:
            self._threads.pop(rank, None)
            if rank in self.lost:
                return
            self._lose(rank, reason)
            self._pass_on()

    def moved(self) -> None:
        """Note that something took place: the bound of a stall counts from here."""
        self._moved = time.monotonic()

    def wait(self, rank: int, awaited: Awaited) -> None:
        """Let others run until it has arrived, or failed; then complete it.

        Raises:
            RuntimeError: the thread is another one than the rank's.
        """
        self._require(rank)
        with self.lock:
            self._deliver_some()
            switch = not awaited.arrived() or self._draw.random() < 0.5
            switch = switch and rank not in self.lost
            if switch:
                self._waiting[rank] = awaited
                self._pass_on()
        if switch:
            self._pass_gate(rank)
        with self.lock:
            awaited.deliver()

    def poll(self, rank: int) -> None:
        """Let others run, and complete some of what has arrived."""
        self._require(rank)
        with self.lock:
            if rank in self.lost:
                return
            self._deliver_some()
            self._ready.append(rank)
            self._pass_on()
        self._pass_gate(rank)

    def stall(self, rank: int) -> None:
        """Stay until the run is over; never returns."""
        self._require(rank)
        with self.lock:
            self._stalled[rank] = "is stalled"
            self._pass_on()
        self._pass_gate(rank)

    def run(self, patience: float) -> None:
        """Let the ranks run until each has ended, is stalled, or is given up.

        Args:
            patience: seconds in which something has to take place; a rank that runs for longer
                is given up.
        """
        with self.lock:
            self._pass_on()
        while not self._idle.wait(max(self._moved + patience - time.monotonic(), 0.001)):
            with self.lock:
                late = time.monotonic() - self._moved >= patience
                if late and self._running is not None and not self._idle.is_set():
                    reason = f"has come no further for {patience:g} s"
                    self._given_up[self._running] = reason
                    self._lose(self._running, reason)
                    self._pass_on()

    def close(self, interrupt: Callable[[int], None]) -> None:
        """End every rank that is left.

        Args:
            interrupt: raises `Abandoned` in the thread of the given number, which runs.
        """
        with self.lock:
            self._over = True
            parked = {*self._stalled, *self._waiting, *self._ready}
            running = [ident for rank, ident in self._threads.items() if rank not in parked]
            for rank in parked:
                self._gates[rank].release()
        for ident in running:
            interrupt(ident)

    def stalled(self) -> dict[int, str]:
        """Ranks that are stalled or were given up, with the reason."""
        return {**self._stalled, **self._given_up}

    def _require(self, rank: int) -> None:
        if self._threads.get(rank) != threading.get_ident():
            raise RuntimeError(f"only the thread of rank {rank} can wait for its collectives")
        if self._over:
            raise Abandoned

    def _pass_gate(self, rank: int) -> None:
        self._gates[rank].acquire()
        if self._over:
            raise Abandoned

    def _lose(self, rank: int, reason: str) -> None:
        self.moved()
        self.lost[rank] = reason
        for awaited in list(self.flying):
            awaited.fail_for({rank: reason})

    def _deliver_some(self) -> None:
        """Complete some of what has arrived, in an order that is drawn."""
        if not self._late:
            return
        flying = [awaited for awaited in self.flying if awaited.arrived()]
        self._draw.shuffle(flying)
        for awaited in flying:
            if self._draw.random() < 0.5:
                awaited.deliver()

    def _pass_on(self) -> None:
        """Give the turn to a rank that can go on; where all wait, what they wait for fails."""
        if self._over:
            return
        able = self._able()
        if not able and self._waiting:
            self._fail_deadlock()
            able = self._able()
        self._running = self._draw.choice(sorted(able)) if able else None
        if self._running is None:
            self._idle.set()
            return
        self._waiting.pop(self._running, None)
        self._ready = [rank for rank in self._ready if rank != self._running]
        self._gates[self._running].release()

    def _able(self) -> list[int]:
        return self._ready + [r for r, awaited in self._waiting.items() if awaited.arrived()]

    def _fail_deadlock(self) -> None:
        """Fail what needs a stalled rank; if nothing does, all ranks wait for each other."""
        waits = {rank: f"waits in {awaited}" for rank, awaited in self._waiting.items()}
        awaited: Sequence[Awaited] = list(self._waiting.values())
        if not any([each.fail_for({**self.lost, **self._stalled}) for each in awaited]):
            for each in awaited:
                each.fail_for(waits)
