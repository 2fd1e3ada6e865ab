"""State spaces, types and addresses of the instructions that touch memory."""

from __future__ import annotations

from twinstep.replay.dtypes import width
from twinstep.replay.ptx.syntax import Instruction, Mem, Operand, Reg, Symbol
from twinstep.replay.translate.emit import Emitter

SPACES = {
    "global": "global",
    "const": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "local": "local",
    "param": "param",
}
"""Replay's memory for each state space of an opcode."""

_COUNTS = {"v2": 2, "v4": 4, "v8": 8}


def shape(instruction: Instruction) -> tuple[str, str, int]:
    """Space ("" when generic), element type and vector length of a memory instruction."""
    parts = instruction.parts
    space = next((SPACES[part] for part in parts if part in SPACES), "")
    count = next((_COUNTS[part] for part in parts if part in _COUNTS), 1)
    return space, parts[-1], count


def address_of(emitter: Emitter, operand: Operand, space: str) -> tuple[str, int]:
    """The expression of a base address and the constant to add."""
    assert isinstance(operand, Mem)
    wide = "u64" if space in ("global", "") else "u32"
    if operand.base is None:
        return emitter.constant(0, wide), operand.offset
    if isinstance(operand.base, Symbol):
        return emitter.constant(emitter.address_of(operand.base), wide), operand.offset
    own = width(emitter.types.kind(operand.base.name))
    return emitter.source(operand.base, "u64" if own == 8 else wide), operand.offset


def is_policy(emitter: Emitter, operand: Operand, parts: tuple[str, ...]) -> bool:
    """The trailing cache-policy register of an access with a cache hint."""
    hinted = any(part.startswith("L2::") for part in parts)
    return (
        hinted
        and isinstance(operand, Reg)
        and emitter.types.kind(operand.name) == "u64"
        and (width(parts[-1]) != 8)
    )
