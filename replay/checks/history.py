"""Memory of the checks of races: the last accesses of each word, through one launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinstep.replay.checks.clocks import Clocks
from twinstep.replay.checks.sums import Sums
from twinstep.replay.checks.uninitialised import Unwritten
from twinstep.replay.dtypes import Array
from twinstep.replay.machine.lanes import MemoryOp
from twinstep.replay.ptx.flow import handed_on, influenced, stored_by_chance
from twinstep.replay.ptx.syntax import Instruction, Kernel

NOBODY = -1


class Trace:
    """The last accesses of each word of one memory: a write and a few reads per word.

    A store of the value that is already there is `silent`: it races with another block's store of
    another value, and with nothing else. Blocks that all raise the same flag do no harm.

    An event is a row of (thread, epoch of its block, epoch of its warp, number of the next release
    of its block, number of the access).

    Args:
        size: Words.
        threads: Of a block.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.threads = threads
        self.write = np.full((size, 5), NOBODY, np.int64)
        self.silent = np.full((size, 5), NOBODY, np.int64)
        self.atomic = np.zeros(size, np.bool_)
        self.reads = [np.full((size, 5), NOBODY, np.int64) for _ in range(2)]
        """The last read, the last of another thread, and, where blocks share a word, the last
        of another block and the last of a third: a block that writes may be the last to read.
        """

    def read(self, place: Array, event: Array) -> None:
        """Note reads; of one word, those that come later here count as later."""
        older = [reads[place] for reads in self.reads]
        self.reads[0][place] = event
        kept = [self.reads[0][place]]
        if not ((older[0][:, 0] != NOBODY) | (kept[0][:, 0] != event[:, 0])).any():
            return
        self._keep(1, place, (older[1], older[0], event), kept, 1)
        block = kept[0][:, 0] // self.threads
        others = [one[:, 0] // self.threads != block for one in (older[0], event)]
        if len(self.reads) == 2:
            if not (others[0] & (older[0][:, 0] != NOBODY) | others[1]).any():
                return
            for _ in range(2):
                self.reads.append(np.full_like(self.write, NOBODY))
                older.append(self.reads[-1][place])
        self._keep(2, place, (older[2], older[0], event), kept, self.threads)
        kept.append(self.reads[2][place])
        self._keep(3, place, (older[3], older[2], older[0], event), kept, self.threads)

    def _keep(
        self, slot: int, place: Array, events: tuple[Array, ...], kept: list[Array], size: int
    ) -> None:
        """Fill a slot with the last of these events whose thread, or block, is not kept already."""
        for event in events:
            wanted = event[:, 0] != NOBODY
            for one in kept:
                wanted &= event[:, 0] // size != one[:, 0] // size
            self.reads[slot][place[wanted]] = event[wanted]


@dataclass
class Access:
    """One instruction's accesses, word by word.

    Attributes:
        place: Position of each word in its trace.
        lane: Which accessing thread the word belongs to.
        event: One row per word, as in `Trace`.
        changed: For a write, which words get another value; else all true.
        value: For a write, the new words.
        label: The tensor, for messages; empty for shared memory.
    """

    place: Array
    lane: Array
    event: Array
    changed: Array
    value: Array | None
    label: str = ""


class History:
    """The accesses of the global memory of one launch.

    Args:
        races: Whether races are looked for.
        unwritten: Bytes that were never written.
        fenced: Whether the kernel has fences.
        word: Bytes of a word, which no access divides; 1 is always right, more is faster.
        kernel: The kernel.
        shaken: Whether floating sums whose bits depend on an order are shaken (see `sums`).
        waits: Whether blocks wait for others.
    """

    def __init__(
        self,
        races: bool,
        unwritten: Unwritten | None,
        fenced: bool,
        word: int,
        kernel: Kernel,
        shaken: bool = False,
        waits: bool = False,
    ) -> None:
        self.races = races
        self.waits = waits
        self.sums = Sums() if shaken else None
        self.kernel = kernel
        self.chance: dict[int, bool] = {}
        self.handed: dict[tuple[int, int], bool] = {}
        self.influence: dict[int, frozenset[int] | None] = {}
        self.word = word
        self.unwritten = unwritten
        self.traces: dict[int, Trace] = {}
        self.clocks = Clocks(fenced)
        self.sites: list[MemoryOp] = []
        """The site of each access."""

    def feeds(self, load: Instruction, store: int) -> bool:
        """True if what a load reads may reach the store of this `id`."""
        if id(load) not in self.influence:
            self.influence[id(load)] = influenced(self.kernel.code, load)
        reached = self.influence[id(load)]
        return reached is None or store in reached

    def handed_on(self, load: MemoryOp, store: MemoryOp) -> bool:
        """True if a warp cannot make the store before all of its threads have read (see `flow`)."""
        key = id(load.instruction), id(store.instruction)
        if key not in self.handed:
            self.handed[key] = handed_on(self.kernel, load.instruction, store.instruction)
        return self.handed[key]

    def by_chance(self, one: MemoryOp, other: MemoryOp, blocks: bool) -> bool:
        """True if one of two strong accesses reads what it then stores, whoever came first.

        Within a block only volatile loads and stores are looked at, between `blocks` atomics, too.
        """
        if [one.kind, other.kind].count("read") != 1:
            return False
        load = (one if one.kind == "read" else other).instruction
        volatile = all("volatile" in site.instruction.parts for site in (one, other))
        if not (blocks or volatile):
            return False
        if id(load) not in self.chance:
            self.chance[id(load)] = stored_by_chance(self.kernel, load)
        return self.chance[id(load)]

    def number(self, site: MemoryOp) -> int:
        """A number for an access that is made now, to be kept in traces."""
        self.sites.append(site)
        return len(self.sites) - 1
