"""A second translation of a kernel that carries shadows beside its registers (see `values`).

Each instruction is emitted as always; around it stands what happens to the shadows. Instructions
that move nothing but plain bits need none. What is not understood here is not guessed at: it
taints its result, or the kernel is not lifted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twinstep.replay.dtypes import Array, raw, width
from twinstep.replay.errors import NotLiftable
from twinstep.replay.isa.forms import NO_EFFECT
from twinstep.replay.machine.program import Layout
from twinstep.replay.ptx.flow import BARRIERS, BRANCHES, Block, defined, family, used
from twinstep.replay.ptx.syntax import Instruction, Kernel, Mem, Operand, Reg
from twinstep.replay.shadow64 import runtime, values
from twinstep.replay.shadow64.values import granules
from twinstep.replay.translate.emit import Emitter
from twinstep.replay.translate.program import HANDLERS
from twinstep.replay.translate.registers import RegisterTypes

PLAIN = frozenset(
    ("setp", "testp", "set", "cvta", "createpolicy", "isspacep", "activemask", "vote", "match")
    + ("elect", "call", "trap", "brkpt", *BRANCHES, *BARRIERS, *NO_EFFECT)
)
"""Instructions whose results are predicates, addresses or masks of threads."""


class LiftedEmitter(Emitter):
    """Translates the blocks of one kernel, shadows included.

    Attributes:
        rules: What happens to the shadows, by family.
        after: What to emit past the instruction at hand.
    """

    def __init__(
        self,
        kernel: Kernel,
        types: RegisterTypes,
        layout: Layout,
        rules: Mapping[str, Rule],
    ) -> None:
        super().__init__(kernel, types, layout, HANDLERS)
        self.rules = rules
        self.after: list[Callable[[], None]] = []
        for module in (values, runtime):
            public = {k: v for k, v in vars(module).items() if callable(v) and k[0] != "_"}
            self.namespace.update({f"s_{name}": value for name, value in public.items()})

    # --- registers -------------------------------------------------------------------------

    def has_shadow(self, name: str) -> bool:
        """True if a register can hold a float at all."""
        if name not in self.kernel.registers or self.types.kind(name) == "pred":
            return False
        return width(self.types.kind(name)) >= 2

    def places(self, names: set[str]) -> list[int]:
        """Slots of registers and of their shadows."""
        found = super().places(names)
        return sorted(
            [*found, *(self.shadow_slot(name) for name in names if self.has_shadow(name))]
        )

    def empty(self, name: str) -> Array:
        """The value of an unwritten register or shadow."""
        if name.endswith("^"):
            return values.plain(self.size(name[:-1]))
        return super().empty(name)

    def shadow_slot(self, name: str) -> int:
        """The slot of a register's shadow."""
        return self.slots.setdefault(f"{name}^", len(self.slots))

    def size(self, name: str) -> int:
        """Granules of a register."""
        return granules(width(self.types.kind(name)))

    def block(self, block: Block) -> list[str]:
        """The lines of one block's function; shadows come and go with the registers."""
        lines = super().block(block)
        touched = {name for i in block.code for name in (*used(i), *defined(i))}
        carried = sorted(name for name in block.live_in & touched if self.has_shadow(name))
        head = [f"    h{self.slot(n)} = R[{self.shadow_slot(n)}]" for n in carried]
        written = {name for i in block.code for name in defined(i)} & block.live_out
        tail = []
        for name in sorted(n for n in written if self.has_shadow(n)):
            value = f"s_kept(h{self.slot(name)}, {self.size(name)})"
            tail.append(f"    R[{self.shadow_slot(name)}] = {value}")
        return [lines[0], *head, *lines[1:-1], *tail, lines[-1]]

    # --- instructions ----------------------------------------------------------------------

    def instruction(self, instruction: Instruction) -> None:
        """Emit one instruction and what it does to shadows."""
        self.after = []
        head = family(instruction)
        if head not in PLAIN:
            self.rules.get(head, LiftedEmitter.integer)(self, instruction)
        elif instruction.operands and not isinstance(instruction.operands[0], Mem):
            for target in self.targets(instruction.operands[0]):
                self.give(target, "None", instruction)
        super().instruction(instruction)
        for finish in self.after:
            finish()

    def shadow_of(self, operand: Operand) -> str:
        """An expression for the shadow of an operand."""
        if isinstance(operand, Reg) and self.has_shadow(operand.name):
            return f"h{self.slot(operand.name)}"
        return "None"

    def give(self, target: Operand, expression: str, instruction: Instruction) -> None:
        """Compute a shadow now and hand it to a register once the instruction is done."""
        if not isinstance(target, Reg) or not self.has_shadow(target.name):
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
        return runtime.site_number(text)

    def taint(self, instruction: Instruction, sources: Sequence[Operand], size: int) -> str:
        """The shadow of a result that no real number goes with."""
        shadows = ", ".join(self.shadow_of(operand) for operand in sources)
        return f"s_tainted({size}, {self.site(instruction)}, {shadows})"

    def integer(self, instruction: Instruction) -> None:
        """An instruction that computes with bits, or one that is not understood."""
        exchanges = family(instruction) == "redux"
        if self.types.by_instruction[id(instruction)] is None and not exchanges:
            place = f"kernel {self.kernel.name}, {instruction.place}"
            raise NotLiftable(f"`{instruction.text}`, {place}")
        sources = instruction.operands[1:]
        for target in self.targets(instruction.operands[0]):
            if isinstance(target, Reg) and self.has_shadow(target.name):
                expression = self.taint(instruction, sources, self.size(target.name))
                self.give(target, expression, instruction)

    def typed(self, operand: Operand, kind: str) -> str:
        """An operand of a float type: bits, but for immediates that are written in the type."""
        return self.source(operand, kind if kind in ("f32", "f64") else raw(kind))

    def integers(self, sources: Sequence[Operand], kind: str) -> str:
        """Bits of operands, as a tuple."""
        return f"({', '.join(self.source(operand, raw(kind)) for operand in sources)},)"


Rule = Callable[[LiftedEmitter, Instruction], None]
