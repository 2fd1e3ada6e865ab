"""The end of loops that never end.

A batch shows that it gets on when a thread finishes or memory is touched at addresses that were not
touched before. Without such a sign for a quarter of the patience, in processor time of this thread,
the batch is watched: its state is compared with a state that it had earlier (Brent's cycle search).
Execution is deterministic, so a state that comes again comes for ever: `NoProgress`. Registers that
no branch, address, stored value or barrier depends on are no part of the state. That holds while no
other thread launches anything, which might store what the batch waits for. A batch that shows
neither ends with `LimitReached` when its patience is over: it may be right, and only long.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from time import thread_time
from typing import Protocol

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.errors import LimitReached, NoProgress
from twinstep.replay.machine.lanes import ActiveLanes, Batch, Checks, Lanes, MemoryOp
from twinstep.replay.machine.program import Program
from twinstep.replay.machine.waiting import Waiting
from twinstep.replay.ptx.flow import BRANCHES, EXIT, defined, family, used, waits_for
from twinstep.replay.ptx.syntax import Mem

PATIENCE = 20.0
"""Seconds of processor time without a sign that a batch gets on, unless options say otherwise."""

EVERY = 16
"""Steps between two looks at the clock."""

KNOWN = 1 << 20
"""Accesses that are remembered; more of them are signs that a batch gets on."""


class _InFlight:
    """The batches of all threads that have begun and not ended; entered by each of them.

    Attributes:
        begun: How many have ever begun.
        count: How many run now.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begun = self.count = 0

    def __enter__(self) -> None:
        with self._lock:
            self.begun += 1
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1


IN_FLIGHT = _InFlight()


class Running(Protocol):
    """The part of `Execution` that is watched."""

    program: Program
    batch: Batch
    waiting: Waiting
    steps: int
    overdue: bool

    @property
    def turn(self) -> int:
        """The position in the order in which paths take turns."""


@dataclass
class _State:
    """A batch at one moment, but for global memory."""

    step: int
    places: bytes
    phase: tuple[int, bool]
    registers: list[Array | None]
    released: bytes
    shared: bytes
    local: bytes


class Watchdog:
    """Watches one batch.

    Args:
        execution: The batch.
        patience: Seconds without a sign that it gets on.
    """

    def __init__(self, execution: Running, patience: float) -> None:
        self.execution = execution
        self.patience = patience
        self.since = thread_time()
        self.finished = 0
        self.known: set[tuple[int, int]] = set()
        self.watch: _Watch | None = None
        self.begun = 0
        self.accompanied = -math.inf

    def look(self, counters: Array | None, pc: int, registers: list[Array | None]) -> int:
        """See whether the batch gets on.

        Args:
            counters: Program counters of threads on different paths, or None.
            pc: That of all threads, where there are none, or of all that have not finished.
            registers: What these threads have, or all of them.

        Returns:
            The step at which to look again.

        Raises:
            NoProgress: it never ends.
            LimitReached: the patience is over.
        """
        now, steps = thread_time(), self.execution.steps
        finished = 0 if counters is None else int(np.count_nonzero(counters == EXIT))
        if finished != self.finished or (self.watch is not None and self.watch.news):
            self._calm(now, finished)
        if IN_FLIGHT.count > 1 or IN_FLIGHT.begun != self.begun:
            self.begun, self.accompanied = IN_FLIGHT.begun, now
        if self.watch is None:
            if now - self.since < self.patience / 4:
                return steps + EVERY
            self.watch = _Watch(self.execution, self.known, now + self.patience / 20)
        self.watch.late = self.watch.late or now > self.watch.warm
        kernel = self.execution.batch.kernel
        alone = now - self.accompanied > self.patience / 4
        if alone and (period := self.watch.recurrence(counters, pc, registers)):
            raise NoProgress(
                f"kernel {kernel}, {self._standing(counters, pc)}; registers and memory are what "
                f"they were {period} steps before, so that this never ends."
            )
        if now - self.since > self.patience:
            raise LimitReached(
                f"Kernel {kernel} has run for {self.patience:g} s without finishing a thread or "
                f"touching other memory, a limit of replay (options(patience=...)) and no fault of "
                f"the kernel: {self._standing(counters, pc)}.",
                "time",
                self._place(counters, pc),
            )
        return steps + 1

    def _standing(self, counters: Array | None, pc: int) -> str:
        return self.execution.waiting.standing(self._counters(counters, pc))

    def _calm(self, now: float, finished: int) -> None:
        self.since, self.finished = now, finished
        if self.watch is not None:
            self.watch.end()
            self.watch = None

    def _counters(self, counters: Array | None, pc: int) -> Array:
        return np.full(self.execution.waiting.shape, pc) if counters is None else counters

    def _place(self, counters: Array | None, pc: int) -> str:
        first = int(self._counters(counters, pc).min())
        return self.execution.program.blocks[first].code[0].place


class _Watch:
    """Everything that changes while a batch is watched; takes the place of its checks."""

    def __init__(self, execution: Running, known: set[tuple[int, int]], warm: float) -> None:
        self.execution = execution
        self.known = known
        self.warm = warm
        self.late = False
        self.news = False
        self.inner: Checks | None = execution.batch.checks
        self.saved: _State | None = None
        self.compared, self.power = 0, 1
        self.touched: dict[tuple[int, bytes], tuple[Array, Array, Array]] = {}
        self.slots = [execution.program.slots[name] for name in deciding(execution.program)]
        execution.batch.checks = self

    def end(self) -> None:
        """Give the batch its own checks back."""
        self.execution.batch.checks = self.inner

    def barrier(self, lanes: Lanes, warp_only: bool, some: bool) -> None:
        """As `Checks.barrier`."""
        if self.inner is not None:
            self.inner.barrier(lanes, warp_only, some)

    def fence(
        self, lanes: Lanes, guard: Array | None, scope: str, acquires: bool, releases: bool
    ) -> None:
        """As `Checks.fence`."""
        if self.inner is not None:
            self.inner.fence(lanes, guard, scope, acquires, releases)

    def shared_access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        flat: Array,
        start: Array,
        data: tuple[Array, ...] | None,
    ) -> None:
        """As `Checks.shared_access`; shared memory is compared as a whole."""
        if self.inner is not None:
            self.inner.shared_access(site, lanes, flat, start, data)

    def summed(
        self,
        kind: str,
        words: Array,
        index: Array,
        turns: tuple[Array, Array, Array],
        part: Array | slice,
    ) -> None:
        """As `Checks.summed`."""
        if self.inner is not None:
            self.inner.summed(kind, words, index, turns, part)

    def global_access(
        self,
        site: MemoryOp,
        lanes: Lanes,
        chosen: ActiveLanes,
        data: tuple[Array, ...] | None,
    ) -> None:
        """Note the addresses, and what a write is about to replace."""
        if self.inner is not None:
            self.inner.global_access(site, lanes, chosen, data)
        places = chosen.address.tobytes()
        access = (id(site), hash(places))
        if access not in self.known:
            self.news |= self.late
            if len(self.known) < KNOWN:
                self.known.add(access)
        if site.kind == "read" or (id(site), places) in self.touched:
            return
        for region, part in chosen.regions():
            content = region.bytes()
            start = (chosen.address[part] - np.uint64(region.start)).astype(np.int64)
            index = start[:, None] + np.arange(site.bytes)
            self.touched[id(site), places] = (content, index, content[index])

    def recurrence(self, counters: Array | None, pc: int, registers: list[Array | None]) -> int:
        """Steps since the batch was in the state it is in now; 0 where that was never noticed."""
        state = self._state(counters, pc, registers)
        if self.saved is not None and self._equal(self.saved, state):
            return state.step - self.saved.step
        self.compared += 1
        if self.saved is None or self.compared == self.power:
            self.saved, self.compared, self.power = state, 0, 2 * self.power
            self.touched.clear()
        return 0

    def _state(self, counters: Array | None, pc: int, registers: list[Array | None]) -> _State:
        execution = self.execution
        # The order of turns matters only where threads are at several places.
        places = np.array([pc]) if counters is None else counters
        apart = len(set(np.unique(places).tolist()) - {EXIT}) > 1
        turn = (execution.turn, execution.overdue) if apart else (0, False)
        live = set(self.slots) if apart else set(execution.program.live_in[int(places.min())])
        return _State(
            execution.steps,
            places.tobytes(),
            turn,
            [registers[slot] if slot in live else None for slot in self.slots],
            execution.waiting.released.tobytes(),
            execution.batch.shared.tobytes(),
            execution.batch.local.tobytes(),
        )

    def _equal(self, a: _State, b: _State) -> bool:
        return (
            (a.places, a.phase, a.released) == (b.places, b.phase, b.released)
            and (a.shared, a.local) == (b.shared, b.local)
            and all(_alike(x, y) for x, y in zip(a.registers, b.registers, strict=True))
            and all(
                np.array_equal(content[index], old) for content, index, old in self.touched.values()
            )
        )


def _alike(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and a.tobytes() == b.tobytes())


def deciding(program: Program) -> list[str]:
    """Registers that a branch, a memory access or a meeting of threads depends on."""
    code = program.kernel.code
    wanted: set[str] = set()
    for instruction in code:
        touches = any(isinstance(operand, Mem) for operand in instruction.operands)
        if touches or family(instruction) in BRANCHES or waits_for(instruction):
            wanted.update(used(instruction))
    before = -1
    while before != len(wanted):
        before = len(wanted)
        for instruction in code:
            if not wanted.isdisjoint(defined(instruction)):
                wanted.update(used(instruction))
    return sorted(name for name in wanted if name in program.slots)
