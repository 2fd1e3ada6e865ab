"""Control flow of a kernel: basic blocks, their successors, and which registers live across them.

A block starts at a branch target, after a branch, and at every instruction that waits for other
threads (barriers, shuffles, votes), so that a thread can be held there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twinstep.replay.isa.limits import construct_of
from twinstep.replay.ptx.syntax import (
    Imm,
    Instruction,
    Kernel,
    Mem,
    Operand,
    Reg,
    Symbol,
    Vec,
    refusal,
)

EXIT = 1 << 30
"""The program counter of a thread that has finished."""

CARRY = "%CC"
"""The carry flag, as a register."""

BRANCHES = frozenset({"bra", "brx", "ret", "exit"})
WARP_SYNC = frozenset({"shfl", "vote", "match", "redux", "elect", "ldmatrix", "stmatrix"})
BARRIERS = frozenset({"bar", "barrier"})
WRITE_NOTHING = BRANCHES | BARRIERS | {"nanosleep"}
"""Families whose first operand is no destination, unless they reduce (`bar.red`)."""


@dataclass
class Block:
    """A run of instructions executed together.

    Attributes:
        index: Position in program order; the program counter of its threads.
        code: The instructions, the terminator included.
        waits: "block" at a barrier, "warp" at a warp-wide instruction, else "".
        targets: Successor block indices: for a conditional branch (taken, not taken).
        live_in: Registers read here or later before they are written.
        live_out: Registers some successor needs.
    """

    index: int
    code: list[Instruction]
    waits: str = ""
    targets: list[int] = field(default_factory=list)
    live_in: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)

    @property
    def branch(self) -> Instruction | None:
        """The terminating branch, if the block does not simply fall through."""
        last = self.code[-1] if self.code else None
        return last if last and family(last) in BRANCHES else None


def family(instruction: Instruction) -> str:
    """The opcode before its first dot."""
    return instruction.opcode.partition(".")[0]


def waits_for(instruction: Instruction) -> str:
    """The threads an instruction waits for: "block", "warp" or none ("")."""
    parts = instruction.parts
    if parts[0] in BARRIERS:
        return "warp" if "warp" in parts else "block"
    return "warp" if parts[0] in WARP_SYNC and "sync" in parts else ""


def waits_for_blocks(blocks: list[Block]) -> bool:
    """True if a loop holds an atomic or a strong load: it may wait for another block's store."""
    for block in blocks:
        for target in block.targets:
            loop = blocks[target : block.index + 1] if target <= block.index else []
            if any(_listens(instruction) for part in loop for instruction in part.code):
                return True
    return False


def influenced(code: list[Instruction], load: Instruction) -> frozenset[int] | None:
    """The `id` of each instruction that what a load reads may reach through registers.

    Returns:
        None where that may be any: it decides a branch, or goes through memory of the thread's own.
    """
    if family(load) not in ("ld", "ldu") or not defined(load):
        return None
    reached = _reached(code, load)
    if any(family(instruction) in BRANCHES or _keeps(instruction) for instruction in reached):
        return None
    return frozenset(map(id, reached))


def decides(code: list[Instruction], atomic: Instruction) -> bool:
    """True if the value of an atomic, a ticket say, reaches a branch or a store."""
    if family(atomic) != "atom" or not defined(atomic):
        return False
    # A guarded one keeps what was in its own register.
    others = (i for i in _reached(code, atomic) if i is not atomic)
    return any(family(i) in BRANCHES | {"st", "atom", "red"} for i in others)


def handed_on(kernel: Kernel, load: Instruction, store: Instruction) -> bool:
    """True if what a load reads must be known before its warp can make a store.

    It enters a shuffle of the whole warp, with nothing but these instructions from the load to the
    store: no thread gets past the shuffle before all threads have read.
    """
    code = kernel.code
    first, last = ([i is one for i in code].index(True) for one in (load, store))
    if not straight(kernel, last) <= first < last:
        return False
    shuffles = [i for i in code[first:last] if family(i) == "shfl" and i.guard is None]
    whole = [i for i in shuffles if i.operands[-1] in (Imm(-1), Imm(0xFFFFFFFF))]
    reached = set(map(id, _reached(code[first:last], load)))
    return any(id(i) in reached for i in whole)


def straight(kernel: Kernel, at: int) -> int:
    """Place of the first instruction from which on nothing but these run before that place."""
    code = kernel.code
    jumps = [i for i in code if family(i) in BRANCHES]
    targets = {kernel.labels[name] for i in jumps for name in branch_labels(kernel, i)}
    while at and at not in targets and family(code[at - 1]) not in BRANCHES:
        at -= 1
    return at


def stored_by_chance(kernel: Kernel, load: Instruction) -> bool:
    """True if what a load reads may be stored, and no loop repeats it until another thread stored.

    In a kernel that waits in such a loop, or by exchanging, the order that this makes is not known;
    there it is never by chance. Nor is it where the value decides alone whether something is stored
    or added: a maximum may be looked at before it is raised, a flag before it is set.
    """
    code, loops = kernel.code, _loops(kernel)
    exchanges = any({"cas", "exch"} & {*i.parts} for i in code)
    if exchanges or any(_awaits(code, i, loops) for i in code):
        return False
    tainted = _tainted(code, load)
    stores = (i for i in code if family(i) in ("st", "atom", "red"))
    return any(name in tainted for i in stores for o in i.operands for name in registers_in(o))


def _awaits(code: list[Instruction], load: Instruction, loops: list[range]) -> bool:
    """True if a strong load decides when a loop around it ends."""
    if family(load) != "ld" or not _listens(load):
        return False
    reached = {id(i) for i in _reached(code, load) if family(i) in BRANCHES}
    around = [[id(code[at]) for at in loop] for loop in loops]
    return any(id(load) in part and not reached.isdisjoint(part) for part in around)


def _loops(kernel: Kernel) -> list[range]:
    """Places of the instructions between a branch backwards and its target, both included."""
    return [
        range(kernel.labels[name], index + 1)
        for index, instruction in enumerate(kernel.code)
        if family(instruction) in BRANCHES
        for name in branch_labels(kernel, instruction)
        if kernel.labels[name] <= index
    ]


def _reached(code: list[Instruction], load: Instruction) -> list[Instruction]:
    """Instructions that read what a load reads, or what derives from it, in registers."""
    tainted = _tainted(code, load)
    return [i for i in code if not tainted.isdisjoint(used(i))]


def _tainted(code: list[Instruction], load: Instruction) -> set[str]:
    """Registers that hold what a load reads, or what derives from it."""
    tainted, before = set(defined(load)), -1
    while before != len(tainted):
        before = len(tainted)
        for instruction in code:
            if not tainted.isdisjoint(used(instruction)):
                tainted.update(defined(instruction))
    return tainted


def _keeps(instruction: Instruction) -> bool:
    """True if an instruction may store to local memory."""
    return family(instruction) == "st" and {"global", "shared"}.isdisjoint(instruction.parts)


def _listens(instruction: Instruction) -> bool:
    strong = not {"volatile", "relaxed", "acquire", "mmio"}.isdisjoint(instruction.parts)
    return family(instruction) == "atom" or (family(instruction) == "ld" and strong)


def registers_in(operand: Operand) -> list[str]:
    """Names of all registers in an operand."""
    if isinstance(operand, Reg):
        return [operand.name] if operand.name != "_" else []
    if isinstance(operand, Vec):
        return [name for item in operand.items for name in registers_in(item)]
    if isinstance(operand, Mem) and isinstance(operand.base, Reg):
        return [operand.base.name]
    return []


def uses_carry(instruction: Instruction) -> tuple[bool, bool]:
    """Two flags: the instruction reads the carry flag, and it writes it."""
    head = family(instruction)
    return head in ("addc", "subc", "madc"), "cc" in instruction.parts


def defined(instruction: Instruction) -> list[str]:
    """Registers that the instruction writes."""
    if "defined" not in instruction.notes:
        instruction.notes["defined"] = _defined(instruction)
    return instruction.notes["defined"]


def _defined(instruction: Instruction) -> list[str]:
    extra = [CARRY] if uses_carry(instruction)[1] else []
    if family(instruction) in WRITE_NOTHING and "red" not in instruction.parts:
        return extra
    if not instruction.operands or isinstance(instruction.operands[0], Mem):
        return extra
    return registers_in(instruction.operands[0]) + extra


def used(instruction: Instruction) -> list[str]:
    """Registers that the instruction reads, guard included.

    A guarded instruction also reads what it writes: where the guard is false the old value stays.
    """
    if "used" not in instruction.notes:
        instruction.notes["used"] = _used(instruction)
    return instruction.notes["used"]


def _used(instruction: Instruction) -> list[str]:
    operands = instruction.operands
    names = [instruction.guard.name] if instruction.guard else []
    written = defined(instruction)
    rest = operands[1:] if set(written) - {CARRY} or _sinks(instruction) else operands
    for operand in rest:
        names.extend(registers_in(operand))
    if uses_carry(instruction)[0]:
        names.append(CARRY)
    return names + (written if instruction.guard else [])


def _sinks(instruction: Instruction) -> bool:
    """True if the first operand is a destination made of sinks only."""
    first = instruction.operands[0] if instruction.operands else None
    return isinstance(first, Reg) and first.name == "_"


def build(kernel: Kernel) -> list[Block]:
    """Split a kernel into blocks and find the live registers of each."""
    code = kernel.code
    leaders = {0}
    for index, instruction in enumerate(code):
        if family(instruction) in BRANCHES:
            leaders.add(index + 1)
            leaders.update(kernel.labels[name] for name in branch_labels(kernel, instruction))
        elif waits_for(instruction):
            leaders.add(index)
    starts = sorted(leader for leader in leaders if leader <= len(code))
    number = {start: index for index, start in enumerate(starts)}
    number[len(code)] = number.get(len(code), EXIT)
    blocks = []
    for index, start in enumerate(starts):
        end = starts[index + 1] if index + 1 < len(starts) else len(code)
        block = Block(index, code[start:end])
        if block.code:
            block.waits = waits_for(block.code[0])
        block.targets = _successors(kernel, block, number, index + 1, len(starts))
        blocks.append(block)
    _liveness(blocks)
    return blocks


def branch_labels(kernel: Kernel, instruction: Instruction) -> list[str]:
    """Labels that a branch may go to; of `ret`, the end of the function where it was put in line.

    Raises:
        UnknownInstruction: where there is no such label.
    """
    head = family(instruction)
    if head not in ("bra", "brx", "ret") or (head == "ret" and not instruction.operands):
        return []
    label = instruction.operands[-1] if instruction.operands else None
    names = [label.name] if isinstance(label, Symbol | Reg) else []
    if head == "brx":
        names = kernel.targets.get(names[0], []) if names else []
    if not names or not all(name in kernel.labels for name in names):
        raise refusal(
            f"Target of {instruction.opcode} is no label of replay's",
            construct_of(instruction.opcode),
            kernel.name,
            instruction.place,
            instruction.text,
        )
    return names


def _successors(
    kernel: Kernel, block: Block, number: dict[int, int], following: int, count: int
) -> list[int]:
    after = following if following < count else EXIT
    branch = block.branch
    if branch is None:
        return [after]
    head = family(branch)
    taken = [number[kernel.labels[name]] for name in branch_labels(kernel, branch)]
    if head == "exit" or not taken:
        taken = [EXIT]
    return taken + ([after] if branch.guard else [])


def _liveness(blocks: list[Block]) -> None:
    reads: list[set[str]] = []
    writes: list[set[str]] = []
    for block in blocks:
        read: set[str] = set()
        written: set[str] = set()
        for instruction in block.code:
            read |= set(used(instruction)) - written
            if instruction.guard is None:
                written |= set(defined(instruction))
        reads.append(read)
        writes.append(written)
    changed = True
    while changed:
        changed = False
        for block, read, written in zip(
            reversed(blocks), reversed(reads), reversed(writes), strict=True
        ):
            out: set[str] = set()
            for target in block.targets:
                if target != EXIT:
                    out |= blocks[target].live_in
            live = read | (out - written)
            if live != block.live_in or out != block.live_out:
                block.live_in, block.live_out = live, out
                changed = True
