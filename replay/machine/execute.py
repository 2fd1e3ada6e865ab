"""Runs a translated kernel over one batch of blocks.

While all threads agree on the next block of code they run as one. When they do not, every thread
has its own program counter: the lowest runs first, so paths meet again where they join. A thread
at a barrier or warp-wide instruction is held until those it waits for have come; now and then
the highest counter is given a turn, so that a loop which waits for another thread's store ends.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.errors import CannotReplay, LimitReached, ReplayError
from twinstep.replay.machine.lanes import Batch, Lanes, Place
from twinstep.replay.machine.program import Program
from twinstep.replay.machine.waiting import Waiting
from twinstep.replay.machine.watchdog import EVERY, IN_FLIGHT, Watchdog
from twinstep.replay.ptx.flow import EXIT, Block, family

FAIR_TURN = 128
"""Steps of one group, or turns of all, after which the highest program counter runs."""

GROUPS = 64
"""Number of groups of rows that are remembered."""

Registers = list[Array | None]


class Execution:
    """The state of one batch: register file, program counters, and how often each block ran.

    Attributes:
        runs: Per block of code, the number of threads that executed it (all visits together).
    """

    def __init__(
        self, program: Program, batch: Batch, max_steps: float, patience: float = math.inf
    ) -> None:
        self.program = program
        self.batch = batch
        self.everyone = Lanes(batch)
        self.registers: Registers = list(program.undefined)
        self.runs = [0] * len(program.blocks)
        self.steps = 0
        self.at = 0
        self.max_steps = max_steps
        # A circle would keep the arguments' memory until garbage is collected.
        self.watchdog = Watchdog(weakref.proxy(self), patience)
        self.look_at = EVERY if patience < math.inf else math.inf
        self.turns = 0
        self.overdue = False
        self.waiting = Waiting(program, batch)
        self.groups: dict[bytes, Lanes] = {}
        for name, slot in program.specials.items():
            self.registers[slot] = special(name, self.everyone)

    def run(self) -> None:
        """Run all threads to their end.

        Raises:
            ReplayError: a fault, or a limit of replay; nothing else.
        """
        try:
            with IN_FLIGHT:
                self._run()
        except ReplayError:
            raise
        except Exception as error:
            memory = isinstance(error, MemoryError)
            raise (LimitReached if memory else CannotReplay)(
                f"Replay itself fails with {type(error).__name__} ({error}), no fault of the "
                f"kernel: kernel {self.batch.kernel}, {self.place}.",
                "memory" if memory else "failure of replay",
                self.place,
            ) from error

    @property
    def place(self) -> str:
        """The line of the block of code that runs."""
        code = self.program.blocks[self.at].code
        return code[0].place if code else "its end"

    @property
    def turn(self) -> int:
        """The position in the order in which paths take turns."""
        return self.turns % FAIR_TURN

    def _run(self) -> None:
        counters: Array | None = None
        pc = 0
        while True:
            if counters is None:
                counters, pc = self._together(pc)
            else:
                counters, pc = self._apart(counters)
            if counters is None and pc == EXIT:
                return

    def _step(self, pc: int) -> Block:
        self.steps += 1
        self.at = pc
        if self.steps > self.max_steps:
            raise LimitReached(
                f"Kernel {self.batch.kernel} has made the {self.max_steps} steps that "
                f"options(max_steps=...) allows, no fault of the kernel: {self.place}.",
                "steps",
                self.place,
            )
        return self.program.blocks[pc]

    def _together(self, pc: int) -> tuple[Array | None, int]:
        """Run blocks while all threads go the same way."""
        functions, registers, everyone = self.program.functions, self.registers, self.everyone
        while pc != EXIT:
            if self.steps >= self.look_at:
                self.look_at = self.watchdog.look(None, pc, registers)
            block = self._step(pc)
            self.runs[pc] += everyone.size
            outcome = functions[pc](registers, everyone)
            if outcome is None:
                pc = block.targets[0]
                continue
            following = successor(block, outcome)
            if isinstance(following, int):
                pc = following
            else:
                whole = (len(self.batch.blocks), self.batch.threads)
                return np.array(np.broadcast_to(following, whole)), 0
        return None, EXIT

    def _apart(self, counters: Array) -> tuple[Array | None, int]:
        """Run one group of threads until it must wait or others have a lower counter."""
        if self.steps >= self.look_at:
            self.look_at = self.watchdog.look(counters, 0, self.registers)
        turn = self.overdue
        pc, mask = self._choose(counters)
        lanes = self._lanes(mask)
        others = counters[~mask]
        # A group whose turn it is out of order runs on, though others are behind it.
        behind = int(others.min()) if others.size and not turn else EXIT
        alone = not np.count_nonzero(others != EXIT)
        limit = self.steps + FAIR_TURN
        own: Registers = [None] * len(self.registers)
        # What a later block of this turn needs is needed now, or written on the way there.
        for slot in self.program.live_in[pc]:
            value = self.registers[slot]
            own[slot] = lanes.gather(self.program.undefined[slot] if value is None else value)
        dirty: set[int] = set()
        following: Array | int = pc
        while True:
            block = self._step(pc)
            self.runs[pc] += lanes.size
            dirty |= self.program.writes[pc]
            following = successor(block, self.program.functions[pc](own, lanes))
            if not isinstance(following, int) or following >= behind or following == EXIT:
                break
            if self.program.blocks[following].waits and lanes.ids is not None:
                break
            if self.steps >= limit:
                self.overdue = not turn
                break
            pc = following
            if alone and self.steps >= self.look_at:
                self.look_at = self.watchdog.look(np.where(mask, pc, EXIT), pc, own)
        for slot in dirty.intersection(self.program.live_out[pc]):
            value = own[slot]
            assert value is not None
            self.registers[slot] = lanes.scatter(
                self.registers[slot], value, self.program.undefined[slot]
            )
        counters = counters.copy()
        counters[mask] = np.broadcast_to(following, lanes.shape).reshape(-1)
        first = int(counters.flat[0])
        if (counters == first).all() and self.waiting.may_join():
            return None, first
        return counters, 0

    def _choose(self, counters: Array) -> tuple[int, Array]:
        """The next group: its program counter and its threads."""
        self.turns += 1
        highest_first = self.overdue or self.turns % FAIR_TURN == 0
        self.overdue = False
        for pc in _highest(counters) if highest_first else _lowest(counters):
            mask = counters == pc
            if self.program.blocks[pc].waits:
                mask &= self.waiting.ready(pc, counters, self.registers)
            if mask.any():
                self.waiting.leave(mask)
                return pc, mask
        raise self.waiting.deadlock(counters)

    def _lanes(self, mask: Array) -> Lanes:
        """The threads of a mask, as whole rows where they are."""
        per_row = mask.sum(axis=1)
        if ((per_row == 0) | (per_row == mask.shape[1])).all():
            if per_row.all():
                return self.everyone
            return self._rows(np.flatnonzero(per_row))
        return Lanes(self.batch, ids=np.flatnonzero(mask.reshape(-1)))

    def _rows(self, rows: Array) -> Lanes:
        """These rows with all their threads; a loop's lanes are the same every turn."""
        key = rows.tobytes()
        if key not in self.groups:
            if len(self.groups) == GROUPS:
                self.groups.clear()
            self.groups[key] = Lanes(self.batch, rows=rows)
        return self.groups[key]


def _lowest(counters: Array) -> Iterator[int]:
    """Program counters of unfinished threads, ascending; mostly nobody asks for a second one."""
    pc = int(counters.min())
    while pc != EXIT:
        yield pc
        pc = int(counters.min(initial=EXIT, where=counters > pc))


def _highest(counters: Array) -> Iterator[int]:
    """The same, descending."""
    return (int(pc) for pc in np.unique(counters)[::-1] if pc != EXIT)


def successor(block: Block, outcome: Array | None) -> Array | int:
    """The next block of threads: one index, or one per thread where they differ."""
    if outcome is None:
        return block.targets[0]
    if block.branch is not None and family(block.branch) == "brx":
        table = np.array(block.targets, np.int64)
        chosen = np.asarray(table[np.minimum(outcome, len(table) - 1)])
        first = int(chosen.flat[0])
        return first if (chosen == first).all() else chosen
    taken = np.count_nonzero(outcome)
    if taken == outcome.size:
        return block.targets[0]
    if not taken:
        return block.targets[1]
    return np.where(outcome, block.targets[0], block.targets[1])


def special(name: str, lanes: Lanes) -> Array:
    """The value of a special register for a whole batch."""
    batch = lanes.batch
    base, _, axis = name[1:].partition(".")
    index = "xyz".find(axis) if axis else 0
    if base in ("ctaid", "clusterid"):
        return _coordinate(batch.blocks.astype(np.uint32)[:, None], batch.grid, index)
    if base in ("nctaid", "nclusterid"):
        return np.array([[batch.grid[index]]], np.uint32)
    return _of_threads(base, index, batch.block)


def _coordinate(linear: Array, extent: Place, index: int) -> Array:
    for size in extent[:index]:
        linear = linear // np.uint32(size)
    return linear if index == 2 else linear % np.uint32(extent[index])


@lru_cache(256)
def _of_threads(base: str, index: int, block: Place) -> Array:
    """The value of a special register that no block differs in; never written to."""
    threads = block[0] * block[1] * block[2]
    thread = np.arange(threads, dtype=np.uint32)[None, :]
    lane = thread & np.uint32(31)
    if base == "tid":
        return _coordinate(thread, block, index)
    constants = {
        "ntid": block[index],
        "nwarpid": -(-threads // 32),
        "cluster_nctaid": 1,
        "cluster_nctarank": 1,
        "cluster_ctaid": 0,
        "cluster_ctarank": 0,
        "smid": 0,
    }
    if base in constants:
        return np.array([[constants[base]]], np.uint32)
    if base == "laneid":
        return lane
    if base == "warpid":
        return thread >> np.uint32(5)
    bit = np.uint32(1) << lane
    below = bit - np.uint32(1)
    return {
        "lanemask_eq": bit,
        "lanemask_lt": below,
        "lanemask_le": below | bit,
        "lanemask_gt": ~(below | bit),
        "lanemask_ge": ~below,
    }[base]
