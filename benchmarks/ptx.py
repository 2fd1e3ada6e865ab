"""One PTX kernel for each instruction: load its sources, execute it, store its result.

A thread handles one element. Predicates travel as 32-bit words, 1 for true. The text is plain PTX
for the driver to compile, with no compiler between it and the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# PTX type → (register type, bytes in memory).
REGISTERS = {
    "u16": ("b16", 2),
    "s16": ("b16", 2),
    "b16": ("b16", 2),
    "f16": ("b16", 2),
    "bf16": ("b16", 2),
    "u32": ("b32", 4),
    "s32": ("b32", 4),
    "b32": ("b32", 4),
    "f32": ("f32", 4),
    "f16x2": ("b32", 4),
    "bf16x2": ("b32", 4),
    "u64": ("b64", 8),
    "s64": ("b64", 8),
    "b64": ("b64", 8),
    "f64": ("f64", 8),
    "pred": ("pred", 4),
}
MOST_SOURCES = 3


@dataclass(frozen=True)
class Instruction:
    """An instruction with the types of its operands.

    Attributes:
        opcode: with all modifiers, such as `add.rn.f32`.
        sources: types of the sources, at most three.
        result: type of the result.
        immediate: last operands, where the instruction wants constants.
        within: lines around it, which show what it does to the carry; `%r` and `%s0` are operands.
        oldest: compute capability × 10 of the first GPU that has it.
    """

    opcode: str
    sources: tuple[str, ...]
    result: str
    immediate: tuple[int, ...] = ()
    within: str = ""
    oldest: int = 80

    @property
    def entry(self) -> str:
        """Name of its kernel."""
        return "_".join(["k", *self.opcode.split("."), *map(str, self.immediate)])


def module(instructions: Sequence[Instruction], version: str, target: str) -> str:
    """PTX text with one kernel for each instruction."""
    head = f".version {version}\n.target {target}\n.address_size 64\n"
    return head + "\n".join(map(kernel, instructions))


def kernel(instruction: Instruction) -> str:
    """One kernel: pointers to at most three sources and to the result, number of elements."""
    names = [f"p{index}" for index in range(MOST_SOURCES + 1)]
    params = ", ".join(f".param .u64 {name}" for name in [*names, "count"])
    lines = [
        ".reg .pred %out; .reg .b32 %c, %i, %n; .reg .b64 %at, %base, %wide, %limit;",
        "mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %i, %tid.x;",
        "mad.lo.s32 %i, %c, %n, %i; cvt.u64.u32 %wide, %i;",
        "ld.param.u64 %limit, [count]; setp.ge.u64 %out, %wide, %limit; @%out bra END;",
    ]
    for index, kind in enumerate(instruction.sources):
        lines += _load(index, kind)
    operands = ["%r", *(f"%s{index}" for index in range(len(instruction.sources)))]
    operands += map(str, instruction.immediate)
    lines.append(f".reg .{REGISTERS[instruction.result][0]} %r;")
    lines.append(instruction.within or f"{instruction.opcode} {', '.join(operands)};")
    lines += _store(instruction.result)
    body = "\n".join(f"  {line}" for line in lines)
    return f".visible .entry {instruction.entry}({params})\n{{\n{body}\nEND:\n  ret;\n}}\n"


def _address(index: int, size: int) -> str:
    return (
        f"ld.param.u64 %base, [p{index}]; cvta.to.global.u64 %base, %base; "
        f"mad.lo.s64 %at, %wide, {size}, %base;"
    )


def _load(index: int, kind: str) -> list[str]:
    register, size = REGISTERS[kind]
    lines = [_address(index, size), f".reg .{register} %s{index};"]
    if kind == "pred":
        return [*lines, f"ld.global.b32 %c, [%at]; setp.ne.s32 %s{index}, %c, 0;"]
    return [*lines, f"ld.global.{register} %s{index}, [%at];"]


def _store(kind: str) -> list[str]:
    register, size = REGISTERS[kind]
    if kind == "pred":
        return [_address(MOST_SOURCES, size), "selp.b32 %c, 1, 0, %r; st.global.b32 [%at], %c;"]
    return [_address(MOST_SOURCES, size), f"st.global.{register} [%at], %r;"]
