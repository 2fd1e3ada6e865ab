"""Code for the instructions that involve other threads, and for traps and calls."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array
from twinstep.replay.errors import KernelTrap
from twinstep.replay.isa.floating import extremum
from twinstep.replay.machine import warp
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.ptx.syntax import Imm, Instruction, Operand, Symbol
from twinstep.replay.translate.emit import Emitter, Handler
from twinstep.replay.translate.registers import unknown

_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _pair(emitter: Emitter, instruction: Instruction, kinds: tuple[str, str]) -> None:
    """Assign t[0] and t[1] to d|p, of which p may be absent."""
    for index, target in enumerate(emitter.targets(instruction.operands[0])):
        emitter.assign(target, f"t[{index}]", kinds[index], instruction.guard)


def _shuffle(emitter: Emitter, instruction: Instruction) -> None:
    mode = instruction.parts[2]
    a, b, c, _ = instruction.operands[1:]
    name = emitter.named("W", partial(warp.shuffle, mode))
    sources = ", ".join(emitter.source(o, "u32") for o in (a, b, c))
    emitter.line(f"t = {name}(L, {sources})")
    _pair(emitter, instruction, ("u32", "pred"))


def _vote(emitter: Emitter, instruction: Instruction) -> None:
    mode = instruction.parts[2]
    target, predicate, mask = instruction.operands
    name = emitter.named("W", partial(warp.vote, mode))
    call = f"{name}(L, {_predicate(emitter, predicate)}, {emitter.source(mask, 'u32')})"
    emitter.assign(target, call, "u32" if mode == "ballot" else "pred", instruction.guard)


def _predicate(emitter: Emitter, operand: Operand) -> str:
    if isinstance(operand, Imm):
        return emitter.constant(int(bool(operand.value)), "pred")
    return emitter.source(operand, "pred")


def _active_mask(emitter: Emitter, instruction: Instruction) -> None:
    name = emitter.named("W", warp.active_mask)
    emitter.assign(instruction.operands[0], f"{name}(L)", "u32", instruction.guard)


def _match(emitter: Emitter, instruction: Instruction) -> None:
    name = emitter.named("W", partial(warp.match, instruction.parts[1]))
    kind = "u64" if instruction.parts[-1] == "b64" else "u32"
    value = emitter.source(instruction.operands[1], kind)
    emitter.line(f"t = {name}(L, {value}, {emitter.source(instruction.operands[2], 'u32')})")
    _pair(emitter, instruction, ("u32", "pred"))


def _redux(emitter: Emitter, instruction: Instruction) -> None:
    parts = instruction.parts
    kind = parts[-1]
    operation = next(p for p in parts if p in _REDUCTIONS)
    combine = (
        extremum(operation == "min", "NaN" in parts) if kind == "f32" else _REDUCTIONS[operation]
    )
    name = emitter.named("W", partial(warp.reduce, combine))
    target, value, mask = instruction.operands
    call = f"{name}(L, {emitter.source(value, kind)}, {emitter.source(mask, 'u32')})"
    emitter.assign(target, call, kind, instruction.guard)


def _elect(emitter: Emitter, instruction: Instruction) -> None:
    name = emitter.named("W", warp.elect)
    emitter.line(f"t = {name}(L, {emitter.source(instruction.operands[1], 'u32')})")
    _pair(emitter, instruction, ("u32", "pred"))


def _barrier(emitter: Emitter, instruction: Instruction) -> None:
    parts = instruction.parts
    if "red" in parts:
        mode = next(p for p in parts if p in ("popc", "and", "or"))
        name = emitter.named("W", partial(warp.block_reduce, mode))
        call = f"{name}(L, {_predicate(emitter, instruction.operands[-1])})"
        kind = "u32" if mode == "popc" else "pred"
        emitter.assign(instruction.operands[0], call, kind, instruction.guard)
    rest = instruction.operands[1:-1] if "red" in parts else instruction.operands
    if "warp" not in parts and not all(isinstance(operand, Imm) for operand in rest):
        raise unknown(emitter.kernel, instruction, "A barrier whose number is no constant")
    count = int(rest[1].value) if len(rest) > 1 and isinstance(rest[1], Imm) else 0
    emitter.line(f"L.barrier({'warp' in parts}, {count})")


def _fence(emitter: Emitter, instruction: Instruction) -> None:
    parts = instruction.parts
    if "proxy" in "".join(parts) or "mbarrier_init" in parts:
        return  # orders other things than accesses of blocks
    scope = next((p for p in ("cta", "cluster", "sys") if p in parts), "gpu")
    acquires, releases = "release" not in parts, "acquire" not in parts
    emitter.line(f"L.fence({emitter.guard(instruction)}, {scope!r}, {acquires}, {releases})")


def _trap(emitter: Emitter, instruction: Instruction) -> None:
    _stop(emitter, instruction, "trap")


def _call(emitter: Emitter, instruction: Instruction) -> None:
    if not instruction.operands:
        return  # the function's code follows
    callee = next((o.name for o in instruction.operands if isinstance(o, Symbol)), "?")
    if callee == "__assertfail":
        _stop(emitter, instruction, "a device assertion failed")
    elif callee != "vprintf":
        raise unknown(emitter.kernel, instruction, f"Call of {callee} is unknown to replay", "call")


def _stop(emitter: Emitter, instruction: Instruction, why: str) -> None:
    name = emitter.named("W", partial(stop, why, instruction))
    emitter.line(f"{name}(L, {emitter.guard(instruction)})")


def stop(why: str, instruction: Instruction, lanes: Lanes, guard: Array | None) -> None:
    """Raise for the first thread that gets here."""
    flags = np.broadcast_to(np.ones((1, 1), NUMPY["pred"]) if guard is None else guard, lanes.shape)
    if flags.any():
        _raise(why, instruction, lanes, int(np.argmax(flags.reshape(-1))))


def _raise(why: str, instruction: Instruction, lanes: Lanes, flat: int) -> NoReturn:
    block, thread = lanes.place(flat)
    raise KernelTrap(
        f"{why}: kernel {lanes.batch.kernel}, {instruction.place}, block {block}, thread {thread}."
    )


HANDLERS: dict[str, Handler] = {
    "shfl": _shuffle,
    "vote": _vote,
    "activemask": _active_mask,
    "match": _match,
    "redux": _redux,
    "elect": _elect,
    "bar": _barrier,
    **dict.fromkeys(("membar", "fence"), _fence),
    "barrier": _barrier,
    "trap": _trap,
    "brkpt": _trap,
    "call": _call,
}
"""The function that emits each family of this module."""
