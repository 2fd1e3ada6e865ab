"""A second translation of a kernel that carries names beside its registers.

Each instruction is emitted as always; before it stands what happens to the names. Pure instructions
make an expression of their opcode; moves move codes; what is not followed is refused as soon as
a name reaches it. Threads follow the values: a predicate with a name that decides where they go is
noted (`runtime.decided`).
"""

from __future__ import annotations

from collections.abc import Mapping

from twinstep.replay.dtypes import Array, width
from twinstep.replay.isa.forms import NO_EFFECT
from twinstep.replay.machine.program import Layout
from twinstep.replay.names import gathered, runtime, values
from twinstep.replay.names.normal import canonical_opcode
from twinstep.replay.names.sums import INSIDE, ROUNDS, Places, nowhere
from twinstep.replay.ptx.flow import family, used
from twinstep.replay.ptx.syntax import Instruction, Kernel, Mem, Operand, Reg
from twinstep.replay.shadow64.emit import LiftedEmitter, Rule
from twinstep.replay.translate.emit import Emitter
from twinstep.replay.translate.registers import RegisterTypes

MOVING = frozenset(
    ("ld", "ldu", "ldmatrix", "st", "mov", "prmt", "shfl", "atom", "red", "bar", "barrier", "call")
)
"""Families that keep their rules inside a sum."""
WARP_WIDE = ("vote", "match", "redux")
BITWISE = ("and", "or", "xor")
CARRIES = ("addc", "subc", "madc")


class NamingEmitter(LiftedEmitter):
    """Translates the blocks of one kernel, names included."""

    def __init__(
        self,
        kernel: Kernel,
        types: RegisterTypes,
        layout: Layout,
        rules: Mapping[str, Rule],
        sums: Places = nowhere,
    ) -> None:
        super().__init__(kernel, types, layout, rules)
        self.sums = sums
        self.rounds = any(self.place_in_sum(i) == ROUNDS for i in kernel.code)
        for module in (values, gathered, runtime):
            public = {k: v for k, v in vars(module).items() if callable(v) and k[0] != "_"}
            self.namespace.update({f"s_{name}": value for name, value in public.items()})

    def has_shadow(self, name: str) -> bool:
        """True if a register can hold a name: predicates can."""
        return name in self.kernel.registers and (
            self.types.kind(name) == "pred" or width(self.types.kind(name)) >= 2
        )

    def empty(self, name: str) -> Array:
        """The value of an unwritten register, or its names."""
        if name.endswith("^"):
            return values.plain(self.size(name[:-1]))
        return Emitter.empty(self, name)

    def shadow_of(self, operand: Operand) -> str:
        """An expression for the names of an operand."""
        names = super().shadow_of(operand)
        negated = isinstance(operand, Reg) and operand.negated and names != "None"
        return f"s_inverted({names})" if negated else names

    def place(self, instruction: Instruction) -> str:
        """The name in the code of an instruction's text and source line."""
        text = f"`{instruction.text}`, {instruction.place}"
        return repr(text)

    def instruction(self, instruction: Instruction) -> None:
        """Emit one instruction and what it does to names."""
        self.after = []
        self.leave(instruction)
        if instruction.guard is not None:
            self.decide(instruction.guard, self.guard(instruction), instruction)
        where = self.place_in_sum(instruction)
        rule = self.rules.get(family(instruction), computed)
        (gather if where and family(instruction) not in MOVING else rule)(self, instruction)
        Emitter.instruction(self, instruction)
        for finish in self.after:
            finish()

    def place_in_sum(self, instruction: Instruction) -> str:
        """Place of an instruction in the code of a sum: inside, where it rounds, or neither."""
        location = instruction.location
        return self.sums(location.file, location.line) if location else ""

    def leave(self, instruction: Instruction) -> None:
        """Emit that operands which a sum has rounded take its name, where others use them."""
        outside = self.rounds and not self.place_in_sum(instruction)
        for name in used(instruction) if outside else ():
            if self.has_shadow(name):
                predicate = self.types.kind(name) == "pred"
                own, size = f"h{self.slot(name)}", 0 if predicate else self.size(name)
                kind = {0: "pred", 2: "u32", 4: "u64"}.get(size)
                if kind is not None:
                    bits = self.source(Reg(name), kind)
                    self.line(f"{own} = s_left({bits}, {own}, {size})")

    def outcome(self, branch: Instruction | None) -> str:
        """The expression that decides where threads go; a name in it is noted."""
        expression = super().outcome(branch)
        if branch is not None and expression != "None":
            operand = branch.operands[0] if family(branch) == "brx" else branch.guard
            assert operand is not None
            if family(branch) == "brx":
                self.line(f"s_concrete({self.place(branch)}, {self.shadow_of(operand)})")
            else:
                self.decide(operand, expression, branch)
        return expression

    def decide(self, operand: Operand, expression: str, instruction: Instruction) -> None:
        """Emit the note of a decision."""
        if isinstance(operand, Reg):
            # By its own value: the note of a negated predicate turns both round.
            names = self.shadow_of(operand)
            if names != "None":
                inside = self.place_in_sum(instruction) == INSIDE
                self.line(f"s_decided({expression}, {names}, {self.place(instruction)}, {inside})")

    def refuse(self, instruction: Instruction) -> None:
        """Emit a check that no name reaches an instruction; its results are plain."""
        names = [self.shadow_of(Reg(name)) for name in used(instruction)]
        known = ", ".join(name for name in names if name != "None")
        if known:
            self.line(f"s_refused({self.place(instruction)}, {known})")
        self.unname(instruction)

    def unname(self, instruction: Instruction) -> None:
        """Emit that an instruction's results have no names."""
        if instruction.operands and not isinstance(instruction.operands[0], Mem):
            for target in self.targets(instruction.operands[0]):
                self.give(target, "None", instruction)


def gather(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """An instruction inside a sum: its results have the mix of its operands."""
    assert isinstance(emitter, NamingEmitter)
    if family(instruction) in IGNORED or not instruction.operands:
        return
    name = family(instruction)
    how = "_by_all" if name in WARP_WIDE else "_apart" if name in BITWISE else ""
    names = "".join(f", {emitter.shadow_of(Reg(name))}" for name in used(instruction))
    for target in emitter.targets(instruction.operands[0]):
        if isinstance(target, Reg) and emitter.has_shadow(target.name):
            kind = emitter.types.kind(target.name)
            size = 0 if kind == "pred" else emitter.size(target.name)
            found = f"s_gathered{how}({size}{names})"
            if name == "selp":
                # A plain predicate (an element behind the end) lets one of the two alone enter.
                a, b, flag = instruction.operands[1:]
                own = ", ".join(emitter.shadow_of(operand) for operand in (flag, a, b))
                plain = emitter.source(flag, "pred")
                found = f"s_gathered_choice({size}, {plain}, {own})"
            emitter.give(target, found, instruction)


def nothing(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """An instruction that moves no data."""


def computed(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """A pure instruction: an expression of its opcode; anything else is refused."""
    assert isinstance(emitter, NamingEmitter)
    operation = emitter.types.by_instruction[id(instruction)]
    parts = instruction.parts
    targets = emitter.targets(instruction.operands[0]) if instruction.operands else []
    odd = family(instruction) in CARRIES or "cc" in parts
    if operation is None or odd or len(targets) != 1:
        emitter.refuse(instruction)
        return
    sources = instruction.operands[1:]
    kinds, result, lanes = list(operation.sources), operation.results[0], 1
    if operation.variadic:
        kinds = kinds[:1] * len(sources)
    opcode = canonical_opcode(instruction.opcode)
    if parts[-1].endswith("x2"):
        lanes, single = 2, parts[-1].removesuffix("x2")
        if single not in ("f16", "bf16", "f32") or {p[-2:] for p in parts[1:-1]} & {"x2"}:
            emitter.refuse(instruction)
            return
        kinds, result, opcode = [single] * len(kinds), single, opcode.removesuffix("x2")
    if len(sources) != len(kinds):
        emitter.refuse(instruction)
        return
    bytes_ = any(k != "pred" and width(k) < 2 for k in (*kinds, result))
    target = targets[0]
    assert isinstance(target, Reg)
    fits = result == "pred" or not emitter.has_shadow(target.name)
    if bytes_ or not (fits or emitter.size(target.name) == lanes * width(result) // 2):
        emitter.refuse(instruction)
        return
    kinds, result = [_named_kind(k) for k in kinds], _named_kind(result)
    give(emitter, instruction, opcode, kinds, result, lanes)


def _named_kind(kind: str) -> str:
    return "b16" if kind == "bf16" else kind


def give(
    emitter: NamingEmitter,
    instruction: Instruction,
    opcode: str,
    kinds: list[str],
    result: str,
    lanes: int,
) -> None:
    """Emit the names of an expression of an instruction's sources."""
    sources = instruction.operands[1:]
    wide = {"f32": "u64"}.get(kinds[0], "u32") if lanes == 2 else ""
    bits = ", ".join(
        emitter.source(o, "pred") if k == "pred" else emitter.typed(o, wide or k)
        for o, k in zip(sources, kinds, strict=True)
    )
    names = ", ".join(emitter.shadow_of(operand) for operand in sources)
    if any(emitter.shadow_of(operand) != "None" for operand in sources):
        expression = (
            f"s_computed({opcode!r}, {tuple(kinds)!r}, {result!r}, {lanes}, "
            f"{emitter.place(instruction)}, ({bits},), {names})"
        )
    else:
        expression = "None"
    emitter.give(instruction.operands[0], expression, instruction)


IGNORED = frozenset(("bra", "ret", "exit", *NO_EFFECT))
