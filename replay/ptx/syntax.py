"""The parts of PTX text: operands, instructions, variables, kernels, modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from twinstep.replay.errors import CannotReplay, UnknownInstruction


@dataclass(frozen=True)
class Location:
    """A line of the kernel's source, from the `.loc` directive in force.

    Code inlined from a helper carries the caller's line too.
    """

    file: str
    line: int
    column: int
    caller: str = ""

    def __str__(self) -> str:
        inlined = f" (inlined at {self.caller})" if self.caller else ""
        return f"{self.file}:{self.line}{inlined}"


@dataclass(frozen=True)
class Reg:
    """A register, special register or (with `negated`) a negated predicate."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """An immediate: an integer, a Python float, or the exact bits of a `0f`/`0d` literal."""

    value: int | float
    bits_of: str = ""


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, parameter or label, plus a constant."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Mem:
    """A bracketed address: a base (register, symbol or nothing) plus a constant."""

    base: Reg | Symbol | None
    offset: int = 0


@dataclass(frozen=True)
class Vec:
    """A braced list of operands; `Reg("_")` stands for a sink."""

    items: tuple[Operand, ...]


Operand = Reg | Imm | Symbol | Mem | Vec


@dataclass
class Instruction:
    """One instruction: guard, opcode with its modifiers, operands, where it came from.

    `notes` keeps what `flow` found out about it.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    location: Location | None
    text: str
    ptx_line: int
    notes: dict[str, list[str]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def place(self) -> str:
        """The origin of the instruction: its source line, or its line of PTX."""
        return str(self.location) if self.location else f"PTX line {self.ptx_line}"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode split at its dots, `::` qualifiers kept whole."""
        return tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Variable:
    """A `.shared`, `.local`, `.global`, `.const` or `.param` variable."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes = b""


@dataclass
class Kernel:
    """An entry or a device function: parameters with their types, registers, variables, code.

    `arguments` holds the `.param` variables of its body, through which it calls functions.
    """

    name: str
    params: list[tuple[Variable, str]]
    results: list[tuple[Variable, str]] = field(default_factory=list)
    arguments: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Module:
    """A PTX file: version, target, module-scope variables, kernels and device functions by name.

    A kernel or function that cannot be read is in `refused`, with the reason.
    """

    version: str
    target: str
    variables: list[Variable]
    kernels: dict[str, Kernel]
    functions: dict[str, Kernel]
    refused: dict[str, CannotReplay]


def refusal(
    what: str, construct: str, kernel: str, place: str, text: str = ""
) -> UnknownInstruction:
    """The error for something in the text of a kernel that replay does not implement.

    Args:
        what: Beginning of the sentence.
        construct: See `CannotReplay`.
        kernel: Name of the kernel or function.
        place: Source line, else line of PTX.
        text: The statement.
    """
    quoted = f", `{text}`" if text else ""
    return UnknownInstruction(
        f"{what}, a limit of replay and no fault of the kernel: kernel {kernel}, {place}{quoted}.",
        construct,
        place,
    )
