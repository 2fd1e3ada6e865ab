"""Writes the Python of one basic block.

`Emitter` knows how operands are read and results written; instructions that touch memory or other
threads are handed to the handlers that it is given (`emit_memory`, `emit_threads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array, raw, undefined, width
from twinstep.replay.errors import CannotReplay
from twinstep.replay.isa.floating import canonical
from twinstep.replay.machine.program import Layout
from twinstep.replay.ptx.flow import CARRY, Block, defined, family, used
from twinstep.replay.ptx.syntax import Imm, Instruction, Kernel, Operand, Reg, Symbol, Vec
from twinstep.replay.translate.registers import RegisterTypes, unknown


class Emitter:
    """Translates the blocks of one kernel.

    Attributes:
        handlers: What emits an instruction that is not pure, by family.
        namespace: Names that the generated code refers to.
        slots: Register name to its index in the register list.
        specials: Special registers met so far.
        charges: Approximate instructions per block, in order of translation.
        charged_at: Source line of the first approximate instruction of each name.
    """

    def __init__(
        self,
        kernel: Kernel,
        types: RegisterTypes,
        layout: Layout,
        handlers: Mapping[str, Handler],
    ) -> None:
        self.kernel = kernel
        self.handlers = handlers
        self.types = types
        self.layout = layout
        self.namespace: dict[str, object] = {
            "np": np,
            "canonical": canonical,
            **{f"T_{kind}": dtype for kind, dtype in NUMPY.items()},
        }
        self.slots: dict[str, int] = {}
        self.specials: set[str] = set()
        self.charges: list[Counter[str]] = []
        self.charged_at: dict[str, str] = {}
        self.functions: dict[int, str] = {}
        self.constants: dict[tuple[str, bytes], str] = {}
        self.lines: list[str] = []
        self.held: dict[str, set[str]] = {}

    # --- blocks ----------------------------------------------------------------------------

    def block(self, block: Block) -> list[str]:
        """The lines of one block's function."""
        self.lines = [f"def block_{block.index}(R, L):"]
        self.held = {}
        self.charges.append(Counter())
        last = {name: i for i, ins in enumerate(block.code) for name in (*used(ins), *defined(ins))}
        done: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in block.live_out:
                done.setdefault(index, []).append(name)
        # What only passes through stays in the list.
        for name in sorted(block.live_in & last.keys()):
            slot = self.slot(name)
            self.line(f"v{slot} = R[{slot}]")
            if name not in block.live_out:
                self.line(f"R[{slot}] = None")
        for index, instruction in enumerate(block.code):
            if instruction is block.branch:
                break
            try:
                self.instruction(instruction)
            except CannotReplay:
                raise
            except Exception as error:
                detail = f" ({error})" if isinstance(error, ValueError) else ""
                why = f"Operands of {instruction.opcode} are not those known to replay{detail}"
                raise unknown(self.kernel, instruction, why) from error
            spent = done.get(index, ())
            if names := [v for n in spent for v in sorted(self.held.pop(n, set()))]:
                self.line(" = ".join(names) + " = None")
        outcome = self.outcome(block.branch)
        for name in sorted(block.live_out & {n for i in block.code for n in defined(i)}):
            self.line(f"R[{self.slot(name)}] = v{self.slot(name)}")
        self.line(f"return {outcome}")
        return self.lines

    def outcome(self, branch: Instruction | None) -> str:
        """The expression that decides where threads go: None when all go one way."""
        if branch is None or (branch.guard is None and family(branch) != "brx"):
            return "None"
        if family(branch) == "brx":
            return self.source(branch.operands[0], "u32")
        assert branch.guard is not None
        return self.source(branch.guard, "pred")

    def line(self, text: str) -> None:
        """Add one line to the function."""
        self.lines.append(f"    {text}")

    def slot(self, name: str) -> int:
        """The index of a register; special registers are noted."""
        if name not in self.slots:
            if name not in self.kernel.registers and name != CARRY:
                self.specials.add(name)
            self.slots[name] = len(self.slots)
        return self.slots[name]

    def places(self, names: set[str]) -> list[int]:
        """The slots of registers."""
        return sorted(self.slots[name] for name in names if name in self.slots)

    def empty(self, name: str) -> Array:
        """The value of a register that was never written."""
        return undefined(self.types.kind(name))

    # --- operands --------------------------------------------------------------------------

    def constant(self, value: int, kind: str) -> str:
        """The name of a uniform constant of a type, from its bits."""
        size = width(kind)
        data = (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        name = self.constants.get((kind, data))
        if name is None:
            name = self.constants[kind, data] = f"K{len(self.constants)}"
            self.namespace[name] = np.frombuffer(data, NUMPY[kind]).reshape(1, 1)
        return name

    def address_of(self, symbol: Symbol) -> int:
        """The address of a variable within its space (global: the real address).

        Raises:
            ValueError: there is no such variable.
        """
        layout = self.layout
        for table in (layout.shared, layout.local, layout.params):
            if symbol.name in table:
                return table[symbol.name] + symbol.offset
        if symbol.name in layout.constants:
            memory = layout.constants[symbol.name][1]
            return -(-memory.ctypes.data // 16) * 16 + symbol.offset
        raise ValueError(f"{symbol.name} is unknown")

    def source(self, operand: Operand, kind: str) -> str:
        """An expression for an operand in a type."""
        if isinstance(operand, Imm):
            return self.constant(immediate_bits(operand, kind), kind)
        if isinstance(operand, Symbol):
            return self.constant(self.address_of(operand), kind)
        if not isinstance(operand, Reg):
            raise ValueError(f"{operand} is no value")
        if kind == "pred":
            return f"~{self.value(operand.name)}" if operand.negated else self.value(operand.name)
        return self.view(operand.name, kind)

    def value(self, name: str) -> str:
        """The local variable of a register in the type it is kept in."""
        variable = f"v{self.slot(name)}"
        self.held.setdefault(name, set()).add(variable)
        return variable

    def view(self, name: str, kind: str) -> str:
        """A register in another type; views are made once per block and definition."""
        own, variable = self.types.kind(name), self.value(name)
        if own == kind or NUMPY[own] == NUMPY[kind]:
            return variable
        viewed = f"v{self.slot(name)}_{kind}"
        if viewed in self.held[name]:
            return viewed
        base = variable
        if name in self.types.loose and NUMPY[own].kind == "f":
            base = f"c{self.slot(name)}"
            if base not in self.held[name]:
                self.line(f"{base} = canonical({variable})")
                self.held[name].add(base)
        self.line(f"{viewed} = {converted(base, own, kind)}")
        self.held[name].add(viewed)
        return viewed

    def bits(self, operand: Operand, size: int) -> str:
        """An operand as unsigned bits of a width."""
        return self.source(operand, {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[size])

    def guard(self, instruction: Instruction) -> str:
        """An expression for the guard of an instruction; "None" where it has none."""
        return "None" if instruction.guard is None else self.source(instruction.guard, "pred")

    # --- results ---------------------------------------------------------------------------

    def assign(self, target: Operand, expression: str, kind: str, guard: Reg | None) -> None:
        """Write a result of a type to a register, keeping the old value where the guard fails."""
        if not isinstance(target, Reg):
            raise ValueError(f"{target} is no register")
        if target.name == "_":
            return
        own = self.types.kind(target.name)
        value = converted(expression, kind, own)
        if guard is not None:
            value = f"np.where({self.source(guard, 'pred')}, {value}, {self.value(target.name)})"
        stale = self.held.pop(target.name, set())
        variable = f"v{self.slot(target.name)}"
        self.line(f"{variable} = {value}")
        if others := sorted(stale - {variable}):
            self.line(" = ".join(others) + " = None")
        self.held[target.name] = {variable}

    def targets(self, operand: Operand) -> list[Operand]:
        """The destinations of an instruction, one by one."""
        return list(operand.items) if isinstance(operand, Vec) else [operand]

    def named(self, prefix: str, value: object) -> str:
        """Give an object a name that the generated code can use."""
        name = f"{prefix}{len(self.namespace)}"
        self.namespace[name] = value
        return name

    # --- instructions ----------------------------------------------------------------------

    def instruction(self, instruction: Instruction) -> None:
        """Emit one instruction that is not a branch."""
        if self.types.by_instruction[id(instruction)] is not None:
            self.pure(instruction)
        elif (handler := self.handlers.get(family(instruction))) is not None:
            handler(self, instruction)
        else:
            raise unknown(self.kernel, instruction)

    def pure(self, instruction: Instruction) -> None:
        """Emit an instruction that only computes."""
        operation = self.types.by_instruction[id(instruction)]
        assert operation is not None
        targets = self.targets(instruction.operands[0])
        operands: list[Operand] = list(instruction.operands[1:])
        if family(instruction) in ("addc", "subc", "madc"):
            operands.append(Reg(CARRY))
        if "cc" in instruction.parts:
            targets.append(Reg(CARRY))
        kinds = operation.sources
        if operation.variadic:
            kinds = kinds[:1] * len(operands)
        if len(operands) != len(kinds):
            raise ValueError(f"{len(operands)} sources, not {len(kinds)}")
        if operation.charge:
            self.charges[-1][operation.charge] += 1
            self.charged_at.setdefault(operation.charge, instruction.place)
        function = operation.first or operation.function
        if operation.plain is not None and _below_width(operands[1], kinds[0]):
            function, kinds = operation.plain, kinds[:1] * 2
        sources = ", ".join(self.source(o, kind) for o, kind in zip(operands, kinds, strict=True))
        wanted = [t for t in targets if not (isinstance(t, Reg) and t.name == "_")]
        if len(operation.results) == 1 or (operation.first and wanted == targets[:1]):
            name = self.function_name(function)
            self.assign(targets[0], f"{name}({sources})", operation.results[0], instruction.guard)
            return
        name = self.function_name(operation.function)
        results = [f"t{i}" for i in range(len(operation.results))]
        self.line(f"{', '.join(results)} = {name}({sources})")
        for target, result, kind in zip(targets, results, operation.results, strict=False):
            self.assign(target, result, kind, instruction.guard)

    def function_name(self, function: object) -> str:
        """The name of a function in the generated code."""
        if isinstance(function, np.ufunc):
            self.namespace[f"np_{function.__name__}"] = function
            return f"np_{function.__name__}"
        if id(function) not in self.functions:
            self.functions[id(function)] = self.named("F", function)
        return self.functions[id(function)]


def _below_width(operand: Operand, kind: str) -> bool:
    """True if an operand is a constant that shifts some bits of a type away, and not all."""
    return isinstance(operand, Imm) and operand.value in range(8 * width(kind))


def converted(expression: str, own: str, kind: str) -> str:
    """A value of one type as another: a view at equal width, else its low or extended bits."""
    if NUMPY[own] == NUMPY[kind]:
        return expression
    if width(own) == width(kind):
        return f"{expression}.view(T_{kind})"
    if NUMPY[own].kind == "f":
        expression, own = f"{expression}.view(T_{raw(own)})", raw(own)
    if width(kind) < width(own):
        return f"{expression}.astype(T_{raw(kind)}).view(T_{kind})"
    return f"{expression}.astype(T_{kind})"


def immediate_bits(operand: Imm, kind: str) -> int:
    """The bits of an immediate in a type.

    A `0f` literal used as f64 and a decimal literal used as f32 are converted, as the ISA says.
    """
    value = operand.value
    dtype = NUMPY[kind]
    if operand.bits_of and dtype.kind == "f" and dtype != NUMPY[operand.bits_of]:
        as_float: Array = np.array(value, f"u{width(operand.bits_of)}").view(NUMPY[operand.bits_of])
        return int(as_float.astype(dtype).view(NUMPY[raw(kind)]))
    if isinstance(value, float):
        real = np.dtype(f"f{width(kind)}")
        return int(np.array(value, real).view(NUMPY[raw(kind)]))
    return int(value)


Handler = Callable[[Emitter, Instruction], None]
