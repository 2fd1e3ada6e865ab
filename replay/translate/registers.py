"""The NumPy type in which each register is kept, and which registers may hold a loose NaN.

A register written always as the same type is kept in that type; otherwise as unsigned bits.
A *loose* register holds the result of float arithmetic whose NaN still carries an operand's
payload; its NaN is made canonical at the first use that can see bits.
"""

from __future__ import annotations

from twinstep.replay.dtypes import NUMPY, raw
from twinstep.replay.errors import UnknownInstruction
from twinstep.replay.isa.forms import resolve
from twinstep.replay.isa.limits import construct_of
from twinstep.replay.isa.operations import Operation
from twinstep.replay.ptx.flow import CARRY, defined, family, used
from twinstep.replay.ptx.syntax import Instruction, Kernel, Reg, refusal

SPECIALS = frozenset(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + [f"%cluster_{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"]
    + [f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"]
    + ["%laneid", "%warpid", "%nwarpid", "%cluster_ctarank", "%cluster_nctarank", "%smid"]
    + [f"%lanemask_{relation}" for relation in ("eq", "lt", "le", "gt", "ge")]
)
"""Special registers that replay provides (all u32)."""


def operation_of(kernel: Kernel, instruction: Instruction) -> Operation | None:
    """The pure operation of an instruction; None if it is of another sort."""
    try:
        return resolve(instruction.opcode)
    except UnknownInstruction:
        raise unknown(kernel, instruction) from None


def unknown(
    kernel: Kernel, instruction: Instruction, why: str = "", construct: str = ""
) -> UnknownInstruction:
    """The error for an instruction that replay does not know."""
    return refusal(
        why or f"Instruction {instruction.opcode} is unknown to replay",
        construct or construct_of(instruction.opcode),
        kernel.name,
        instruction.place,
        instruction.text,
    )


class RegisterTypes:
    """Types and looseness of a kernel's registers."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        for instruction in kernel.code:
            for name in (*used(instruction), *defined(instruction)):
                self._known(instruction, name)
        self.operations = [operation_of(kernel, i) for i in kernel.code]
        self.by_instruction = {id(i): o for i, o in zip(kernel.code, self.operations, strict=True)}
        self.kinds: dict[str, str] = {}
        self.loose: set[str] = set()
        moves: list[tuple[str, str]] = []
        for instruction, operation in zip(kernel.code, self.operations, strict=True):
            if operation is not None:
                names = defined(instruction)
                for name, kind in zip(names, operation.results, strict=False):
                    self._define(name, kind)
                    if operation.canonical:
                        self.loose.add(name)
            elif family(instruction) == "mov" and len(instruction.operands) != 2:
                raise unknown(kernel, instruction, "A mov without source and target")
            elif family(instruction) == "mov" and isinstance(instruction.operands[1], Reg):
                for name in defined(instruction):
                    moves.append((name, instruction.operands[1].name))
            else:
                for name in defined(instruction):
                    self._define(name, self.declared(name))
        self._follow(moves)

    def _follow(self, moves: list[tuple[str, str]]) -> None:
        """Moves pass type and looseness on, until nothing changes."""
        for _ in range(len(moves) + 1):
            before = (dict(self.kinds), set(self.loose))
            for target, source in moves:
                if source in self.loose:
                    self.loose.add(target)
                if source in self.kinds:
                    self._define(target, self.kinds[source])
            if (self.kinds, self.loose) == before:
                break
        for target, source in moves:
            if self.kind(source) != self.kind(target):
                self._define(target, self.declared(target))

    def _known(self, instruction: Instruction, name: str) -> None:
        kind = self.kernel.registers.get(name)
        if kind is None and name not in SPECIALS and name != CARRY:
            why = f"Register {name} is unknown to replay"
            raise unknown(self.kernel, instruction, why, construct_of(name))
        if kind is not None and kind not in NUMPY:
            why = f"Register {name} has type .{kind}, unknown to replay"
            raise unknown(self.kernel, instruction, why, construct_of(kind))

    def declared(self, name: str) -> str:
        """The unsigned type of a register's declared width."""
        return "pred" if name == CARRY else raw(self.kernel.registers.get(name, "u32"))

    def _define(self, name: str, kind: str) -> None:
        known = self.kinds.get(name)
        wide = self.declared(name)
        if NUMPY[kind].itemsize != NUMPY[wide].itemsize or (known and known != kind):
            self.kinds[name] = wide
        else:
            self.kinds[name] = kind if known is None else known

    def kind(self, name: str) -> str:
        """The type a register is kept in."""
        return self.kinds.get(name) or self.declared(name)
