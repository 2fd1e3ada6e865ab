"""Floats that a loop of compare-and-swap adds: what the new value is made of."""

from __future__ import annotations

from twinstep.replay.ptx.flow import family, registers_in, straight, used
from twinstep.replay.ptx.syntax import Instruction, Kernel, Operand

FLOATS = {"b16": ("f16", "bf16"), "b32": ("f32",), "b64": ("f64",)}


def added(kernel: Kernel, swap: Instruction) -> tuple[str, tuple[Operand, ...]] | None:
    """The type of the sum that a compare-and-swap stores, and its term, or the factors of it.

    The sum is formed just before the swap, with nothing but moves between the two: the other
    addend is the value that is compared.

    Args:
        kernel: The kernel.
        swap: An `atom.cas`; for anything else there is no sum.
    """
    if "cas" not in swap.parts or len(swap.operands) < 4:
        return None
    expected, new = swap.operands[2:4]
    kinds = FLOATS.get(swap.parts[-1], ())
    code = kernel.code
    at = next(place for place, instruction in enumerate(code) if instruction is swap)
    before = code[straight(kernel, at) : at]
    made = _origin(new, before)
    total = next((i for i in reversed(before) if i.operands[:1] == (made,)), None)
    if total is None or family(total) not in ("add", "fma") or total.parts[-1] not in kinds:
        return None
    _, *terms = total.operands
    origin = _origin(expected, before)
    if family(total) == "fma":
        *factors, old = terms
        return (total.parts[-1], tuple(factors)) if _origin(old, before) == origin else None
    for old, term in (terms, reversed(terms)):
        if _origin(old, before) == origin:
            return total.parts[-1], (term,)
    return None


def keep_terms(kernel: Kernel) -> None:
    """Let each swap that stores a sum read its term as well, which lives until then."""
    for swap in kernel.code:
        if found := added(kernel, swap):
            names = [name for term in found[1] for name in registers_in(term)]
            swap.notes["used"] = [*used(swap), *names]


def _origin(operand: Operand, before: list[Instruction]) -> Operand:
    """What an operand was moved from, as far back as these instructions go."""
    for instruction in reversed(before):
        moved = family(instruction) == "mov" and instruction.guard is None
        if moved and instruction.operands[0] == operand and len(instruction.operands) == 2:
            operand = instruction.operands[1]
    return operand
