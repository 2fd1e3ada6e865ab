"""Shadows of what moves between registers and threads: whole granules keep theirs."""

from __future__ import annotations

from twinstep.replay.dtypes import width
from twinstep.replay.ptx.flow import family
from twinstep.replay.ptx.syntax import Imm, Instruction, Reg, Vec
from twinstep.replay.shadow64.emit import LiftedEmitter
from twinstep.replay.shadow64.values import granules


def resized(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Between integers of other widths the low granules move; everything else computes."""
    target, source = instruction.parts[-2:]
    register, operand = instruction.operands[:2]
    moves = target[0] in "usb" and source[0] in "usb" and "sat" not in instruction.parts
    if not moves or not isinstance(register, Reg) or min(width(target), width(source)) < 2:
        emitter.integer(instruction)
        return
    g = granules(min(width(target), width(source)))
    low = f"s_sliced({emitter.shadow_of(operand)}, 0, {g})"
    size = emitter.size(register.name)
    emitter.give(register, f"s_packed((({low}, {g}),), {size})", instruction)


def move(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """A move, whole or from and to parts."""
    target, source = instruction.operands
    if isinstance(target, Vec):
        g = granules(width(instruction.parts[-1])) // len(target.items)
        for index, item in enumerate(target.items):
            part = f"s_sliced({emitter.shadow_of(source)}, {index * g}, {g})"
            emitter.give(item, part if g else "None", instruction)
    elif isinstance(source, Vec) and isinstance(target, Reg):
        whole = granules(width(instruction.parts[-1]))
        g = whole // len(source.items)
        parts = "".join(f"({emitter.shadow_of(item)}, {g})," for item in source.items)
        emitter.give(target, f"s_packed(({parts}), {whole})" if g else "None", instruction)
    else:
        emitter.give(target, emitter.shadow_of(source), instruction)


def select(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """One of two, by a predicate."""
    target, a, b, condition = instruction.operands
    if family(instruction) == "slct" or not isinstance(target, Reg):
        emitter.integer(instruction)
        return
    if not emitter.has_shadow(target.name):
        return
    guard = emitter.source(condition, "pred")
    size = emitter.size(target.name)
    chosen = f"s_merged({guard}, {emitter.shadow_of(a)}, {emitter.shadow_of(b)}, {size})"
    emitter.give(target, chosen, instruction)


def shuffle(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Another thread's value."""
    a, b, c = instruction.operands[1:4]
    sources = ", ".join(emitter.source(operand, "u32") for operand in (b, c))
    mode = instruction.parts[2]
    taken = f"s_exchanged(L, {mode!r}, {emitter.shadow_of(a)}, {sources}, 2)"
    for index, target in enumerate(emitter.targets(instruction.operands[0])):
        emitter.give(target, taken if index == 0 else "None", instruction)


def shift(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """By whole granules bits move; otherwise they are computed with."""
    target, value, amount = instruction.operands
    size = granules(width(instruction.parts[-1]))
    signed = instruction.parts[-1][0] == "s" and family(instruction) == "shr"
    if not isinstance(amount, Imm) or int(amount.value) % 16 or size < 2 or signed:
        emitter.integer(instruction)
        return
    by = min(int(amount.value) // 16, size)
    shadow_of = emitter.shadow_of(value)
    if family(instruction) == "shl":
        parts = f"((None, {by}), (s_sliced({shadow_of}, 0, {size - by}), {size - by}),)"
    else:
        parts = f"((s_sliced({shadow_of}, {by}, {size - by}), {size - by}),)"
    emitter.give(target, f"s_packed({parts}, {size})" if by < size else "None", instruction)


def logic(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """`and` with a mask of whole granules and `or` of separate ones move bits."""
    target, a, b = instruction.operands
    kind = instruction.parts[-1]
    if kind == "pred":
        return
    size = granules(width(kind))
    if family(instruction) == "or":
        bits = emitter.integers((a, b), kind)
        shadows = f"{emitter.shadow_of(a)}, {emitter.shadow_of(b)}"
        site = emitter.site(instruction)
        emitter.give(target, f"s_overlaid({size}, {site}, {bits}, {shadows})", instruction)
        return
    value = int(b.value) if isinstance(b, Imm) else -1
    masks = [(value >> 16 * i) & 0xFFFF for i in range(size)]
    if not isinstance(b, Imm) or set(masks) - {0, 0xFFFF} or family(instruction) != "and":
        emitter.integer(instruction)
        return
    parts = "".join(
        f"(s_sliced({emitter.shadow_of(a)}, {i}, 1), 1)," if mask else "(None, 1),"
        for i, mask in enumerate(masks)
    )
    emitter.give(target, f"s_packed(({parts}), {size})", instruction)


def permute(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Of whole granules bits move."""
    target, a, b, selector = instruction.operands
    nibbles = (
        [(int(selector.value) >> 4 * i) & 15 for i in range(4)] if isinstance(selector, Imm) else []
    )
    pairs = list(zip(nibbles[::2], nibbles[1::2], strict=True))
    if not pairs or any(low % 2 or high != low + 1 or low > 6 for low, high in pairs):
        emitter.integer(instruction)
        return
    rows = [(emitter.shadow_of(a if low < 4 else b), low % 4 // 2) for low, _ in pairs]
    parts = "".join(f"(s_sliced({name}, {at}, 1), 1)," for name, at in rows)
    emitter.give(target, f"s_packed(({parts}), 2)", instruction)
