"""Rules of shadows for each family of instructions: formulas in float64, moves, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.ptx.syntax import Instruction
from twinstep.replay.shadow64 import emit_memory, emit_moves
from twinstep.replay.shadow64.emit import LiftedEmitter, Rule
from twinstep.replay.shadow64.values import SIZES

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
"""The meaning of an instruction in real numbers."""

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})


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
    shadows = ", ".join(emitter.shadow_of(operand) for operand in sources)
    # Immediates are written in the type; registers are taken as bits.
    bits = ", ".join(emitter.typed(operand, kind) for operand in sources)
    expression = (
        f"s_arithmetic({name}, {kind!r}, {emitter.site(instruction)}, ({bits},), {shadows})"
    )
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
        emit_moves.resized(emitter, instruction)
        return
    operands = instruction.operands[1:]
    bits = ", ".join(emitter.typed(operand, source) for operand in operands)
    shadows = ", ".join(emitter.shadow_of(operand) for operand in operands)
    kinds = (source,) * len(operands)
    expression = (
        f"s_converted({target!r}, {kinds!r}, {emitter.site(instruction)}, ({bits},), {shadows})"
    )
    emitter.give(instruction.operands[0], expression, instruction)


RULES: dict[str, Rule] = {
    **dict.fromkeys((*FORMULAS, "min", "max"), _arithmetic),
    "cvt": _convert,
    "mov": emit_moves.move,
    "selp": emit_moves.select,
    "slct": emit_moves.select,
    "shfl": emit_moves.shuffle,
    "shl": emit_moves.shift,
    "shr": emit_moves.shift,
    "and": emit_moves.logic,
    "or": emit_moves.logic,
    "xor": emit_moves.logic,
    "prmt": emit_moves.permute,
    "ld": emit_memory.load,
    "ldu": emit_memory.load,
    "st": emit_memory.store,
    "atom": emit_memory.atomic,
    "red": emit_memory.atomic,
}
