"""Parameters that an address was computed from: for messages, and to find tables of addresses."""

from __future__ import annotations

from twinstep.replay.ptx.flow import defined, family, registers_in
from twinstep.replay.ptx.syntax import Instruction, Kernel, Mem, Symbol


def parameters_of_address(kernel: Kernel, instruction: Instruction) -> list[str]:
    """Names of the parameters that the address of a memory instruction derives from.

    Follows definitions backwards through arithmetic and moves, not through loads from memory.
    """
    definitions: dict[str, list[Instruction]] = {}
    for candidate in kernel.code:
        for name in defined(candidate):
            definitions.setdefault(name, []).append(candidate)
    address = next((o for o in instruction.operands if isinstance(o, Mem)), None)
    pending = registers_in(address) if address is not None else []
    seen: set[str] = set()
    found: list[str] = []
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for source in definitions.get(name, []):
            if family(source) in ("atom", "shfl") or _reads_memory(source):
                continue
            for operand in source.operands[1:]:
                if isinstance(operand, Mem) and isinstance(operand.base, Symbol):
                    found.append(operand.base.name)
                pending.extend(registers_in(operand))
    return sorted(set(found))


def _reads_memory(instruction: Instruction) -> bool:
    return family(instruction) == "ld" and "param" not in instruction.parts
