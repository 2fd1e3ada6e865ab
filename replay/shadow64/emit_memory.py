"""Shadows of what moves between registers and memory."""

from __future__ import annotations

from collections.abc import Callable

from twinstep.replay.dtypes import width
from twinstep.replay.ptx.syntax import Instruction, Operand, Reg
from twinstep.replay.shadow64.emit import LiftedEmitter
from twinstep.replay.translate.addresses import address_of, is_policy, shape


def _places(
    emitter: LiftedEmitter, instruction: Instruction, place: Operand, space: str
) -> tuple[str, str]:
    """Emit which threads access memory, and where; names of both, and of the memory."""
    base, offset = address_of(emitter, place, space)
    name = f"q{len(emitter.lines)}"
    guard = emitter.guard(instruction)
    emitter.line(f"{name} = s_access(L, {space!r}, {base}, {offset}, {guard})")
    return name, f"s_memory(L, {space!r})"


def load(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """A load finds the shadow that was stored with these bits."""
    space, kind, _ = shape(instruction)
    items = emitter.targets(instruction.operands[0])
    word = width(kind)
    if space == "param" or word < 2:
        for item in items:
            emitter.give(item, "None", instruction)
        return
    at, memory = _places(emitter, instruction, instruction.operands[1], space)
    for index, item in enumerate(items):
        if isinstance(item, Reg) and emitter.has_shadow(item.name):
            emitter.after.append(_loaded(emitter, instruction, item, (at, memory, word, index)))


def _loaded(
    emitter: LiftedEmitter, instruction: Instruction, item: Reg, how: tuple[str, str, int, int]
) -> Callable[[], None]:
    at, memory, word, index = how
    name, size = f"h{emitter.slot(item.name)}", emitter.size(item.name)
    guard = emitter.guard(instruction)
    held = f"q{len(emitter.lines)}"
    if guard != "None":
        emitter.line(f"{held} = {guard}")

    def finish() -> None:
        bits = emitter.bits(item, word)
        start = f"{at}[1] + {index * word // 2}"
        new = f"s_load({memory}, L, {at}[0], {start}, {word}, {bits})"
        if size != word // 2:
            new = f"s_packed((({new}, {word // 2}),), {size})"
        if guard != "None":
            new = f"s_merged({held}, {new}, {name}, {size})"
        emitter.line(f"{name} = {new}")

    return finish


def store(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """A store puts the shadow beside the memory."""
    space, kind, _ = shape(instruction)
    word = width(kind)
    if space == "param" or word < 2:
        return
    at, memory = _places(emitter, instruction, instruction.operands[0], space)
    for index, item in enumerate(emitter.targets(instruction.operands[1])):
        start = f"{at}[1] + {index * word // 2}"
        bits = emitter.bits(item, word)
        shadow_of = emitter.shadow_of(item)
        emitter.line(f"s_store({memory}, L, {at}[0], {start}, {word}, {bits}, {shadow_of})")


def atomic(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Sums of floats are lifted; every other atomic taints what it touches."""
    parts, kind = instruction.parts, instruction.parts[-1]
    returns = parts[0] == "atom"
    rest = instruction.operands[1:] if returns else instruction.operands
    values = [
        value
        for operand in rest[1:]
        if not is_policy(emitter, operand, parts)
        for value in emitter.targets(operand)
    ]
    space = "shared" if any(part.startswith("shared") for part in parts) else "global"
    word = width(kind)
    if word >= 2:
        at, memory = _places(emitter, instruction, rest[0], space)
        lifted = "add" in parts and kind in ("f32", "f64")
        for index, value in enumerate(values):
            name = f"q{len(emitter.lines)}"
            bits = emitter.typed(value, kind) if lifted else emitter.bits(value, word)
            emitter.line(f"{name} = {bits}, {emitter.shadow_of(value)}")
            call = (
                f"s_atomic({memory}, L, {at}[0], {at}[1] + {index * word // 2}, {kind!r}, "
                f"{space!r}, *{name}, {lifted}, {emitter.site(instruction)})"
            )
            emitter.after.append(lambda call=call: emitter.line(call))  # type: ignore[misc]
    if returns:
        for target in emitter.targets(instruction.operands[0]):
            if isinstance(target, Reg) and emitter.has_shadow(target.name):
                spoiled = emitter.taint(instruction, values, emitter.size(target.name))
                emitter.give(target, spoiled, instruction)
