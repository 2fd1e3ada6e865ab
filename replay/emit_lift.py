"""A second translation of a kernel that carries shades beside its registers (see `shade`).

Each instruction is emitted as always; around it stands what happens to the shades. Instructions
that move nothing but plain bits need none. What is not understood here is not guessed at: it
taints its result, or the kernel is not lifted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from twinstep.replay import emit_lift_memory, emit_lift_moves, lift_runtime, shade
from twinstep.replay.dtypes import Array, raw, width
from twinstep.replay.emit import Emitter
from twinstep.replay.errors import NotLiftable
from twinstep.replay.flow import Block, defined, family, used
from twinstep.replay.registers import RegisterTypes
from twinstep.replay.shade import SIZES, granules
from twinstep.replay.syntax import Instruction, Kernel, Mem, Operand, Reg
from twinstep.replay.translate import Layout

Function = Callable[[Sequence[Array], Sequence[Array]], Array]
FORMULAS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
    "div": np.divide,
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "abs": np.abs,
    "neg": np.negative,
    "copysign": lambda a, b: np.copysign(b, a),
}
"""What an instruction means in real numbers."""

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
PLAIN = frozenset(
    ("setp", "testp", "set", "cvta", "createpolicy", "isspacep", "activemask", "vote", "match")
    + ("elect", "bar", "barrier", "call", "bra", "brx", "ret", "exit", "trap", "brkpt", "membar")
    + ("fence", "prefetch", "prefetchu", "griddepcontrol", "nanosleep", "setmaxnreg", "pmevent")
    + ("discard", "applypriority")
)
"""Instructions whose results are predicates, addresses or masks of threads."""


class LiftedEmitter(Emitter):
    """Translates the blocks of one kernel, shades included.

    Attributes:
        after: What to emit behind the instruction at hand.
    """

    def __init__(self, kernel: Kernel, types: RegisterTypes, layout: Layout) -> None:
        super().__init__(kernel, types, layout)
        self.after: list[Callable[[], None]] = []
        for module in (shade, lift_runtime):
            public = {k: v for k, v in vars(module).items() if callable(v) and k[0] != "_"}
            self.namespace.update({f"s_{name}": value for name, value in public.items()})

    # --- registers -------------------------------------------------------------------------

    def has_shade(self, name: str) -> bool:
        """Whether a register can hold a float at all."""
        if name not in self.kernel.registers or self.types.kind(name) == "pred":
            return False
        return width(self.types.kind(name)) >= 2

    def places(self, names: set[str]) -> list[int]:
        """Slots of registers and of their shades."""
        found = super().places(names)
        return sorted([*found, *(self.shade_slot(name) for name in names if self.has_shade(name))])

    def empty(self, name: str) -> Array:
        """What an unwritten register or shade holds."""
        if name.endswith("^"):
            return shade.plain(self.size(name[:-1]))
        return super().empty(name)

    def shade_slot(self, name: str) -> int:
        """The slot of a register's shade."""
        return self.slots.setdefault(f"{name}^", len(self.slots))

    def size(self, name: str) -> int:
        """Granules of a register."""
        return granules(width(self.types.kind(name)))

    def block(self, block: Block) -> list[str]:
        """The lines of one block's function; shades come and go with the registers."""
        lines = super().block(block)
        touched = {name for i in block.code for name in (*used(i), *defined(i))}
        carried = sorted(name for name in block.live_in & touched if self.has_shade(name))
        head = [f"    h{self.slot(n)} = R[{self.shade_slot(n)}]" for n in carried]
        written = {name for i in block.code for name in defined(i)} & block.live_out
        tail = []
        for name in sorted(n for n in written if self.has_shade(n)):
            value = f"s_kept(h{self.slot(name)}, {self.size(name)})"
            tail.append(f"    R[{self.shade_slot(name)}] = {value}")
        return [lines[0], *head, *lines[1:-1], *tail, lines[-1]]

    # --- instructions ----------------------------------------------------------------------

    def instruction(self, instruction: Instruction) -> None:
        """Emit one instruction and what it does to shades."""
        self.after = []
        head = family(instruction)
        if head not in PLAIN:
            handler = HANDLERS.get(head, LiftedEmitter.integer)
            handler(self, instruction)
        elif instruction.operands and not isinstance(instruction.operands[0], Mem):
            for target in self.targets(instruction.operands[0]):
                self.give(target, "None", instruction)
        super().instruction(instruction)
        for finish in self.after:
            finish()

    def shade_of(self, operand: Operand) -> str:
        """An expression for the shade of an operand."""
        if isinstance(operand, Reg) and self.has_shade(operand.name):
            return f"h{self.slot(operand.name)}"
        return "None"

    def give(self, target: Operand, expression: str, instruction: Instruction) -> None:
        """Compute a shade now and hand it to a register once the instruction is done."""
        if not isinstance(target, Reg) or not self.has_shade(target.name):
            return
        temporary = f"q{len(self.lines)}"
        name, size = f"h{self.slot(target.name)}", self.size(target.name)
        if instruction.guard is not None:
            guard = self.source(instruction.guard, "pred")
            expression = f"s_merged({guard}, {expression}, {name}, {size})"
        self.line(f"{temporary} = {expression}")
        self.after.append(lambda: self.line(f"{name} = {temporary}"))

    def site(self, instruction: Instruction) -> int:
        """The number of an instruction, for taints."""
        text = f"`{instruction.text}`, kernel {self.kernel.name}, {instruction.place}"
        return lift_runtime.site_number(text)

    def taint(self, instruction: Instruction, sources: Sequence[Operand], size: int) -> str:
        """The shade of a result that no real number goes with."""
        shades = ", ".join(self.shade_of(operand) for operand in sources)
        return f"s_tainted({size}, {self.site(instruction)}, {shades})"

    def integer(self, instruction: Instruction) -> None:
        """An instruction that computes with bits, or one that is not understood."""
        exchanges = family(instruction) == "redux"
        if self.types.by_instruction[id(instruction)] is None and not exchanges:
            place = f"kernel {self.kernel.name}, {instruction.place}"
            raise NotLiftable(f"`{instruction.text}`, {place}")
        sources = instruction.operands[1:]
        for target in self.targets(instruction.operands[0]):
            if isinstance(target, Reg) and self.has_shade(target.name):
                expression = self.taint(instruction, sources, self.size(target.name))
                self.give(target, expression, instruction)

    def typed(self, operand: Operand, kind: str) -> str:
        """An operand of a float type: bits, but for immediates that are written in the type."""
        return self.source(operand, kind if kind in ("f32", "f64") else raw(kind))

    def integers(self, sources: Sequence[Operand], kind: str) -> str:
        """Bits of operands, as a tuple."""
        return f"({', '.join(self.source(operand, raw(kind)) for operand in sources)},)"


def _arithmetic(emitter: LiftedEmitter, instruction: Instruction) -> None:
    parts, kind = instruction.parts, instruction.parts[-1]
    odd = {"sat", "relu", "xorsign"} & set(parts) or (parts[0] == "min" and "abs" in parts)
    mixed = len(parts) > 2 and parts[-2] in FLOATS
    if kind not in SIZES or odd or mixed:
        emitter.integer(instruction)
        return
    function = _extremum(parts) if parts[0] in ("min", "max") else _formula(parts[0])
    name = emitter.named("F", function)
    sources = instruction.operands[1:]
    shades = ", ".join(emitter.shade_of(operand) for operand in sources)
    # Immediates are written in the type; registers are taken as bits.
    bits = ", ".join(emitter.typed(operand, kind) for operand in sources)
    expression = f"s_arithmetic({name}, {kind!r}, {emitter.site(instruction)}, ({bits},), {shades})"
    emitter.give(instruction.operands[0], expression, instruction)


def _formula(name: str) -> Function:
    formula = FORMULAS[name]
    return lambda wides, narrow: formula(*wides)


def _extremum(parts: Sequence[str]) -> Function:
    """Min or max: the wide value of the operand that the narrow values choose."""
    smaller, spread = parts[0] == "min", "NaN" in parts

    def pick(wides: Sequence[Array], narrow: Sequence[Array]) -> Array:
        wide, own = wides[0], narrow[0]
        for other, also in zip(wides[1:], narrow[1:], strict=True):
            nan = np.isnan(own) if not spread else np.isnan(also)
            closer = (also < own) if smaller else (also > own)
            tied = (also == own) & ((other < wide) if smaller else (other > wide))
            chosen = nan | closer | tied
            wide, own = np.where(chosen, other, wide), np.where(chosen, also, own)
        return np.asarray(wide)

    return pick


def _convert(emitter: LiftedEmitter, instruction: Instruction) -> None:
    parts = instruction.parts
    target, source = parts[-2], parts[-1]
    plain_modes = {"rn", "rz", "rm", "rp", "rna", "ftz", "satfinite"}
    if (
        target.removesuffix("x2") not in FLOATS
        or source not in FLOATS
        or (set(parts[1:-2]) - plain_modes)
    ):
        emit_lift_moves.resized(emitter, instruction)
        return
    operands = instruction.operands[1:]
    bits = ", ".join(emitter.typed(operand, source) for operand in operands)
    shades = ", ".join(emitter.shade_of(operand) for operand in operands)
    kinds = (source,) * len(operands)
    expression = (
        f"s_converted({target!r}, {kinds!r}, {emitter.site(instruction)}, ({bits},), {shades})"
    )
    emitter.give(instruction.operands[0], expression, instruction)


Handler = Callable[[LiftedEmitter, Instruction], None]
HANDLERS: dict[str, Handler] = {
    **dict.fromkeys((*FORMULAS, "min", "max"), cast(Handler, _arithmetic)),
    "cvt": _convert,
    "mov": emit_lift_moves.move,
    "selp": emit_lift_moves.select,
    "slct": emit_lift_moves.select,
    "shfl": emit_lift_moves.shuffle,
    "shl": emit_lift_moves.shift,
    "shr": emit_lift_moves.shift,
    "and": emit_lift_moves.logic,
    "or": emit_lift_moves.logic,
    "xor": emit_lift_moves.logic,
    "prmt": emit_lift_moves.permute,
    "ld": emit_lift_memory.load,
    "ldu": emit_lift_memory.load,
    "st": emit_lift_memory.store,
    "atom": emit_lift_memory.atomic,
    "red": emit_lift_memory.atomic,
}
