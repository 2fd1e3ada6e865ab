"""A second translation that reports integers divided by zero, and NaNs where they arise.

A NaN arises where an instruction without a NaN among its sources gives one. Lanes that a mask
excludes from every store compute too, and are reported too.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NoReturn

import numpy as np

from twinstep.replay.dtypes import Array, raw
from twinstep.replay.errors import InvalidArithmetic
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.machine.program import Program
from twinstep.replay.ptx.flow import family
from twinstep.replay.ptx.syntax import Instruction
from twinstep.replay.translate.emit import Emitter
from twinstep.replay.translate.program import HANDLERS, emitted
from twinstep.replay.translate.registers import RegisterTypes

_LARGEST = {
    "bf16": (16, 0x7F80),
    "f16x2": (16, 0x7C00),
    "bf16x2": (16, 0x7F80),
    "f32x2": (32, 0x7F800000),
    "e4m3x2": (8, 0x7E),
    "e5m2x2": (8, 0x7C),
}
"""Bits of each part and the last pattern before the NaNs, for types that NumPy does not have."""


@cache
def checked(program: Program) -> Program:
    """The checked translation of a program, made once."""
    kernel, layout = program.kernel, program.layout
    return emitted(kernel, layout, _CheckedEmitter(kernel, RegisterTypes(kernel), layout, HANDLERS))


class _CheckedEmitter(Emitter):
    """Writes a check around each instruction that may divide by zero or make a NaN."""

    def pure(self, instruction: Instruction) -> None:
        operation = self.types.by_instruction[id(instruction)]
        assert operation is not None
        parts = instruction.parts
        results = _named(parts[-2] if parts[0] == "cvt" else parts[-1], operation.results)
        kinds = [] if parts[0] == "set" else [kind for kind in results if _is_float(kind)]
        types = _named(parts[-1], operation.sources)
        sources = zip(instruction.operands[1:], types, strict=False)
        if family(instruction) in ("div", "rem") and not kinds:
            divisor = self.source(instruction.operands[2], operation.sources[1])
            name = self.named("W", partial(divided, instruction))
            self.line(f"{name}(L, {divisor}, {self.guard(instruction)})")
        if not kinds:
            super().pure(instruction)
            return
        marks = [
            f"{self.named('W', partial(nans, kind))}({self.source(operand, kind)})"
            for operand, kind in sources
            if _is_float(kind)
        ]
        before = f"n{len(self.lines)}"
        self.line(f"{before} = {' | '.join(marks) or 'False'}")
        super().pure(instruction)
        target = self.targets(instruction.operands[0])[0]
        made = f"{self.named('W', partial(nans, kinds[0]))}({self.source(target, kinds[0])})"
        name = self.named("W", partial(arisen, instruction))
        self.line(f"{name}(L, {made}, {before}, {self.guard(instruction)})")


def _named(kind: str, kinds: tuple[str, ...]) -> list[str]:
    """Types with the float type of an opcode in place of the bits that its function works on."""
    if not _is_float(kind):
        return list(kinds)
    return [kind if k == raw(kind) else k for k in kinds]


def _is_float(kind: str) -> bool:
    return kind in ("f16", "f32", "f64") or kind in _LARGEST


def nans(kind: str, value: Array) -> Array:
    """Flags of the values of a float type that are NaN, or hold one."""
    if kind not in _LARGEST:
        return np.isnan(value)
    bits, largest = _LARGEST[kind]
    low = value.dtype.type((1 << (bits - 1)) - 1)
    found = (value & low) > largest
    if kind != "bf16":
        found = found | ((value >> value.dtype.type(bits) & low) > largest)
    return np.asarray(found)


def divided(instruction: Instruction, lanes: Lanes, divisor: Array, guard: Array | None) -> None:
    """Raise for the first thread that divides by zero."""
    _report(instruction, lanes, divisor == 0, guard, "division of an integer by zero")


def arisen(
    instruction: Instruction, lanes: Lanes, made: Array, before: Array, guard: Array | None
) -> None:
    """Raise for the first thread that makes a NaN of numbers."""
    if np.count_nonzero(made):
        _report(instruction, lanes, np.asarray(made & ~np.asarray(before)), guard, "a NaN arises")


def _report(
    instruction: Instruction, lanes: Lanes, wrong: Array, guard: Array | None, what: str
) -> None:
    if guard is not None:
        wrong = np.asarray(wrong & guard)
    if np.count_nonzero(wrong):
        whole = np.broadcast_to(wrong, lanes.shape)
        _raise(instruction, lanes, int(np.argmax(whole.reshape(-1))), what)


def _raise(instruction: Instruction, lanes: Lanes, flat: int, what: str) -> NoReturn:
    block, thread = lanes.place(flat)
    raise InvalidArithmetic(
        f"{what}: kernel {lanes.batch.kernel}, {instruction.place}, `{instruction.text}`, block "
        f"{block}, thread {thread}."
    )
