"""Calls of device functions, put in line: one copy of a function's code for each call.

The parameters and results of such a call become local memory of the caller, so that `st.param` and
`ld.param` of them are `st.local` and `ld.local`, in counts too. `ret` in a copy goes to its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from twinstep.replay.errors import CannotReplay, LimitReached
from twinstep.replay.ptx.flow import family, registers_in
from twinstep.replay.ptx.syntax import (
    Instruction,
    Kernel,
    Mem,
    Module,
    Operand,
    Reg,
    Symbol,
    Variable,
    Vec,
    refusal,
)

MOST = 200_000
"""Instructions of a kernel with all its calls put in line."""

_PARAM = re.compile(r"\.param(?:::func)?\b")


def inlined(module: Module, kernel: Kernel) -> Kernel:
    """A kernel without calls of the module's functions; itself where it has none.

    Raises:
        CannotReplay: a call through a register, a recursion, a function that cannot be read, or
            more instructions than `MOST`.
    """
    if not any(family(instruction) == "call" for instruction in kernel.code):
        return kernel
    return _Inliner(module, kernel).run()


@dataclass
class _Copy:
    """One copy of a function: the ending of its names, the names that the caller gives."""

    function: Kernel
    suffix: str
    given: dict[str, str] = field(default_factory=dict)

    def name(self, name: str) -> str:
        """A register, label or variable of the function, in the kernel that it is put into."""
        if name in self.given:
            return self.given[name]
        own = (self.function.registers, self.function.labels, self.function.arguments)
        if any(name in names for names in own) or name in self.function.targets:
            return name + self.suffix
        if any(variable.name == name for variable in self.function.variables):
            # No function is at work twice in one thread: all copies share their variables.
            return f"{self.function.name}:{name}" if self.suffix else name
        return name

    def operand(self, operand: Operand) -> Operand:
        """An operand with the names of this copy."""
        if isinstance(operand, Reg | Symbol):
            return replace(operand, name=self.name(operand.name))
        if isinstance(operand, Vec):
            return Vec(tuple(self.operand(item) for item in operand.items))
        if isinstance(operand, Mem) and operand.base is not None:
            base = self.operand(operand.base)
            assert isinstance(base, Reg | Symbol)
            return Mem(base, operand.offset)
        return operand


class _Inliner:
    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module = module
        self.kernel = kernel
        self.result = Kernel(kernel.name, kernel.params, arguments=kernel.arguments)
        self.passed: set[str] = set()
        self.copies = 0

    def run(self) -> Kernel:
        self._copy(_Copy(self.kernel, ""), ())
        self.result.code = [self._moved(instruction) for instruction in self.result.code]
        return self.result

    def _copy(self, copy: _Copy, callers: tuple[str, ...]) -> None:
        """Append the code of a function, and that of all functions that it calls."""
        function, result = copy.function, self.result
        result.registers |= {copy.name(n): kind for n, kind in function.registers.items()}
        result.targets |= {
            copy.name(n): [copy.name(label) for label in labels]
            for n, labels in function.targets.items()
        }
        known = {variable.name for variable in result.variables}
        own = (replace(v, name=copy.name(v.name)) for v in function.variables)
        result.variables += [variable for variable in own if variable.name not in known]
        labels: dict[int, list[str]] = {}
        for label, place in function.labels.items():
            labels.setdefault(place, []).append(copy.name(label))
        for index, instruction in enumerate(function.code):
            result.labels |= dict.fromkeys(labels.get(index, ()), len(result.code))
            here = replace(
                instruction,
                operands=tuple(copy.operand(operand) for operand in instruction.operands),
                guard=instruction.guard
                and replace(instruction.guard, name=copy.name(instruction.guard.name)),
                notes={},
            )
            if family(here) == "call":
                self._call(copy, here, (*callers, function.name))
            elif family(here) == "ret" and copy.suffix:
                result.code.append(replace(here, operands=(Symbol(f"end{copy.suffix}"),)))
            else:
                result.code.append(here)
        result.labels |= dict.fromkeys(labels.get(len(function.code), ()), len(result.code))

    def _call(self, copy: _Copy, call: Instruction, callers: tuple[str, ...]) -> None:
        callee = next((o for o in call.operands if not isinstance(o, Vec)), None)
        name = callee.name if isinstance(callee, Symbol) else ""
        if not name:
            raise self._refused(copy, call, "A call through a register", "indirect call")
        if name in self.module.refused:
            raise self.module.refused[name]
        function = self.module.functions.get(name)
        if function is None:
            self.result.code.append(call)
            return
        if name in callers:
            raise self._refused(copy, call, f"The recursion of {name}", "recursion")
        self.copies += 1
        inner = _Copy(function, f"@call{self.copies}", self._arguments(copy, call, function))
        end = Symbol(f"end{inner.suffix}")
        if call.guard is not None:
            skip = replace(call.guard, negated=not call.guard.negated)
            self.result.code.append(
                replace(call, opcode="bra", operands=(end,), guard=skip, notes={})
            )
        self.result.code.append(replace(call, operands=(), guard=None))
        self._copy(inner, callers)
        self.result.labels[end.name] = len(self.result.code)
        if len(self.result.code) > MOST:
            raise LimitReached(
                f"Kernel {self.kernel.name} has more than {MOST} instructions with its calls put "
                f"in line, a limit of replay and no fault of the kernel: {call.place}.",
                "call",
                call.place,
            )

    def _arguments(self, copy: _Copy, call: Instruction, function: Kernel) -> dict[str, str]:
        """Names that the caller gives to results and parameters of a function."""
        place = next(i for i, o in enumerate(call.operands) if isinstance(o, Symbol))
        lists = (call.operands[:place], call.operands[place + 1 :])
        given: dict[str, str] = {}
        for operands, declared in zip(lists, (function.results, function.params), strict=True):
            items = [i for o in operands if isinstance(o, Vec) for i in o.items]
            if len(items) != len(declared):
                raise self._refused(copy, call, f"{len(items)} values for {len(declared)}", "call")
            for item, (variable, _) in zip(items, declared, strict=True):
                self._pass(copy, call, item, variable)
                assert isinstance(item, Symbol)
                given[variable.name] = item.name
        return given

    def _pass(self, copy: _Copy, call: Instruction, item: Operand, wanted: Variable) -> None:
        """Give an argument of a call its place in local memory."""
        name = item.name if isinstance(item, Symbol) else ""
        known = self.result.arguments | {
            copy.name(n): replace(v, name=copy.name(n)) for n, v in copy.function.arguments.items()
        }
        if name not in known and name not in self.passed or not name:
            raise self._refused(copy, call, "An argument that is no .param variable", "call")
        if name in self.passed:
            return
        if known[name].size != wanted.size:
            raise self._refused(copy, call, f"An argument not of {wanted.size} bytes", "call")
        self.passed.add(name)
        self.result.variables.append(replace(known[name], space="local"))

    def _moved(self, instruction: Instruction) -> Instruction:
        """An access of an argument as one of local memory."""
        for operand in instruction.operands:
            if isinstance(operand, Symbol) and operand.name in self.passed:
                raise self._refused(None, instruction, "The address of a parameter", "call")
            if not isinstance(operand, Mem) or not _PARAM.search(instruction.opcode):
                continue
            through = bool(registers_in(operand))
            if through and self.passed:
                raise self._refused(None, instruction, "A parameter through a register", "call")
            if isinstance(operand.base, Symbol) and operand.base.name in self.passed:
                opcode = _PARAM.sub(".local", instruction.opcode)
                return replace(instruction, opcode=opcode, notes={})
        return instruction

    def _refused(
        self, copy: _Copy | None, instruction: Instruction, what: str, construct: str
    ) -> CannotReplay:
        name = copy.function.name if copy else self.kernel.name
        return refusal(what, construct, name, instruction.place, instruction.text)
