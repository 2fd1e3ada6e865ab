"""Passing a barrier or a warp-wide instruction, and the error when no thread may."""

from __future__ import annotations

from functools import cache

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.errors import Deadlock
from twinstep.replay.machine.lanes import Batch
from twinstep.replay.machine.program import Program
from twinstep.replay.machine.warp import ballot_bits
from twinstep.replay.ptx.flow import EXIT, family
from twinstep.replay.ptx.syntax import Imm, Instruction, Operand, Reg


@cache
def _barriers(program: Program) -> dict[int, tuple[int, int]]:
    """By block of code, the number of its barrier and for how many threads it waits; 0 for all."""
    found = {}
    for block in program.blocks:
        if block.waits == "block":
            instruction = block.code[0]
            operands = list(instruction.operands)
            if "red" in instruction.parts:
                operands = operands[1:-1]
            numbers = [int(o.value) for o in operands if isinstance(o, Imm)]
            found[block.index] = (numbers[0] if numbers else 0), (numbers[1:] or [0])[0]
    return found


class Waiting:
    """Decides which of the threads at a waiting instruction may run.

    A barrier lets a block pass when all of its threads (or as many as the instruction says) are
    at a barrier of that number; a finished thread never comes. A warp-wide instruction lets
    those pass whose named partners are at the same instruction or have finished.
    """

    def __init__(self, program: Program, batch: Batch) -> None:
        self.program = program
        self.batch = batch
        self.shape = (len(batch.blocks), batch.threads)
        self.released = np.zeros(self.shape, np.bool_)
        self.barriers = _barriers(program)

    def ready(self, pc: int, counters: Array, registers: list[Array | None]) -> Array:
        """Flags of the threads that may run the waiting block `pc`."""
        if self.program.blocks[pc].waits == "block":
            return self._at_barrier(pc, counters)
        return self._in_warp(pc, counters, registers)

    def _at_barrier(self, pc: int, counters: Array) -> Array:
        number, count = self.barriers[pc]
        same = [p for p, (other, _) in self.barriers.items() if other == number]
        here = np.isin(counters, same) & ~self.released
        full = here.sum(axis=1) >= (count or self.batch.threads)
        self.released |= here & full[:, None]
        return np.asarray(self.released & (counters == pc))

    def leave(self, mask: Array) -> None:
        """These threads run now: their permission is used up."""
        self.released &= ~mask

    def may_join(self) -> bool:
        """True if threads that all stand at one place may go on as one.

        Not while some of a block have been let through the barrier where they stand (by threads at
        another one of the same number) and the others, who came later, have not.
        """
        if (self.released != self.released[:, :1]).any():
            return False
        self.released[:] = False
        return True

    def _in_warp(self, pc: int, counters: Array, registers: list[Array | None]) -> Array:
        instruction = self.program.blocks[pc].code[0]
        needed = np.broadcast_to(self._members(instruction, registers), self.shape)
        present = (counters == pc) | (counters == EXIT)
        threads = self.shape[1]
        pad = -threads % 32
        padded = np.pad(present, ((0, 0), (0, pad)), constant_values=True)
        bits = ballot_bits(padded.reshape(self.shape[0], -1, 32)).reshape(self.shape[0], -1)
        return np.asarray((needed & ~bits[:, :threads]) == 0)

    def _members(self, instruction: Instruction, registers: list[Array | None]) -> Array:
        """The member mask of a warp-wide instruction; matrices are moved by whole warps."""
        if family(instruction) in ("ldmatrix", "stmatrix"):
            return np.array([[0xFFFFFFFF]], np.uint32)
        index = 0 if family(instruction) in ("bar", "barrier") else -1
        return self._mask(instruction.operands[index], registers)

    def _mask(self, operand: Operand, registers: list[Array | None]) -> Array:
        if isinstance(operand, Imm):
            return np.array([[int(operand.value) & 0xFFFFFFFF]], np.uint32)
        assert isinstance(operand, Reg)
        slot = self.program.slots[operand.name]
        value = registers[slot]
        return (self.program.undefined[slot] if value is None else value).view(np.uint32)

    def deadlock(self, counters: Array) -> Deadlock:
        """The error with the places of all threads of a block."""
        return Deadlock(f"kernel {self.batch.kernel}, {self.standing(counters)}; nobody can go on.")

    def standing(self, counters: Array) -> str:
        """The places of the threads of the first block that has not finished."""
        row = int(np.argmax((counters != EXIT).any(axis=1)))
        places = []
        for pc in np.unique(counters[row]):
            threads = np.flatnonzero(counters[row] == pc)
            who = f"{len(threads)} threads (first {self.batch.thread_place(int(threads[0]))})"
            if pc == EXIT:
                places.append(f"{who} have finished")
                continue
            instruction = self.program.blocks[int(pc)].code[0]
            place = instruction.place
            stand = "wait" if self.program.blocks[int(pc)].waits else "are"
            places.append(f"{who} {stand} at {place} `{instruction.text}`")
        return f"block {self.batch.block_place(row)}: " + "; ".join(places)
