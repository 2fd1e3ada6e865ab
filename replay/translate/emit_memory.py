"""Code for the instructions that move data: mov, ld, st, cvta, atomics and asynchronous copies."""

from __future__ import annotations

import numpy as np

from twinstep.replay.dtypes import Array, raw, width
from twinstep.replay.machine.access import LOCAL_WINDOW, SHARED_WINDOW, Site
from twinstep.replay.machine.async_copy import AsyncCopy
from twinstep.replay.machine.atomics import AtomicSite
from twinstep.replay.machine.generic_access import GenericSite
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.machine.matrices import MatrixSite
from twinstep.replay.machine.parameters import ParameterSite
from twinstep.replay.ptx.exchanged import added
from twinstep.replay.ptx.syntax import Imm, Instruction, Mem, Operand, Reg, Symbol, Vec
from twinstep.replay.translate.addresses import SPACES, address_of, is_policy, shape
from twinstep.replay.translate.emit import Emitter, Handler
from twinstep.replay.translate.registers import unknown


def _move(emitter: Emitter, instruction: Instruction) -> None:
    target, source = instruction.operands
    kind = instruction.parts[-1]
    guard = instruction.guard
    if isinstance(target, Vec):
        whole = emitter.source(source, raw(kind))
        size = width(kind) // len(target.items)
        for index, item in enumerate(target.items):
            shift = emitter.constant(8 * size * index, raw(kind))
            part = f"({whole} >> {shift})" if index else whole
            emitter.assign(item, f"{part}.astype(T_u{8 * size})", f"u{8 * size}", guard)
    elif isinstance(source, Vec):
        size = width(kind) // len(source.items)
        terms = []
        for index, item in enumerate(source.items):
            part = f"{emitter.bits(item, size)}.astype(T_{raw(kind)})"
            shift = emitter.constant(8 * size * index, raw(kind))
            terms.append(f"({part} << {shift})" if index else part)
        emitter.assign(target, " | ".join(terms), raw(kind), guard)
    elif isinstance(source, Reg) and kind != "pred" and isinstance(target, Reg):
        own = emitter.types.kind(target.name)
        same = emitter.types.kind(source.name) == own
        emitter.assign(
            target,
            emitter.source(source, own if same else raw(kind)),
            own if same else raw(kind),
            guard,
        )
    else:
        emitter.assign(target, emitter.source(source, raw(kind)), raw(kind), guard)


def _site(
    instruction: Instruction, access: str, space: str, size: int, count: int, offset: int
) -> Site | GenericSite:
    if space == "":
        return GenericSite(instruction, access, size, count, offset)
    return Site(instruction, access, space, size, count, offset)


def _load(emitter: Emitter, instruction: Instruction) -> None:
    space, kind, count = shape(instruction)
    items = emitter.targets(instruction.operands[0])
    if space == "param":
        _load_parameter(emitter, instruction, kind, items)
        return
    base, offset = address_of(emitter, instruction.operands[1], space)
    site = emitter.named("S", _site(instruction, "read", space, width(kind), count, offset))
    guard = instruction.guard
    direct = all(_keeps(emitter, item, kind) for item in items)
    old = [
        emitter.bits(item, width(kind))
        if direct and not _sink(item)
        else emitter.constant(0, raw(kind))
        for item in items
    ]
    olds = f"({', '.join(old)},)" if guard is not None else "()"
    emitter.line(f"t = {site}.load(L, {base}, {emitter.guard(instruction)}, {olds})")
    # A guarded load keeps old values itself, unless the register is wider than the word.
    outer = None if direct else guard
    for index, item in enumerate(items):
        value = f"t[{index}]"
        signed = kind[0] == "s" and not direct
        emitter.assign(
            item,
            f"{value}.view(T_{kind})" if signed else value,
            kind if signed else raw(kind),
            outer,
        )
    emitter.line("t = None")


def _sink(item: Operand) -> bool:
    return isinstance(item, Reg) and item.name == "_"


def _keeps(emitter: Emitter, item: Operand, kind: str) -> bool:
    return isinstance(item, Reg) and (
        item.name == "_" or width(emitter.types.kind(item.name)) == width(kind)
    )


def _load_parameter(
    emitter: Emitter, instruction: Instruction, kind: str, items: list[Operand]
) -> None:
    place = instruction.operands[1]
    assert isinstance(place, Mem)
    if isinstance(place.base, Symbol) and place.base.name in emitter.kernel.arguments:
        for item in items:  # the result of a call that did nothing
            emitter.assign(item, emitter.constant(0, raw(kind)), raw(kind), instruction.guard)
        return
    if not isinstance(place.base, Symbol):
        site = emitter.named("S", ParameterSite(instruction, width(kind), len(items)))
        base, offset = address_of(emitter, place, "")
        address = f"({base} + {emitter.constant(offset, 'u64')})"
        emitter.line(f"t = {site}.load(L, {address}, {emitter.guard(instruction)})")
        for index, item in enumerate(items):
            emitter.assign(item, f"t[{index}].view(T_{kind})", kind, instruction.guard)
        emitter.line("t = None")
        return
    start = emitter.layout.params[place.base.name] + place.offset
    emitter.namespace["parameter"] = parameter
    for index, item in enumerate(items):
        value = f"parameter(L, {start + index * width(kind)}, T_{kind})"
        emitter.assign(item, value, kind, instruction.guard)


def parameter(lanes: Lanes, offset: int, dtype: np.dtype[np.generic]) -> Array:
    """One uniform value from the parameter bytes."""
    return np.frombuffer(lanes.batch.params, dtype, 1, offset).reshape(1, 1)


def _store(emitter: Emitter, instruction: Instruction) -> None:
    space, kind, count = shape(instruction)
    if space == "param":
        _store_argument(emitter, instruction)
        return
    base, offset = address_of(emitter, instruction.operands[0], space)
    values = [emitter.bits(v, width(kind)) for v in emitter.targets(instruction.operands[1])]
    site = emitter.named("S", _site(instruction, "write", space, width(kind), count, offset))
    guard = emitter.guard(instruction)
    emitter.line(f"{site}.store(L, {base}, {guard}, ({', '.join(values)},))")


def _store_argument(emitter: Emitter, instruction: Instruction) -> None:
    """An argument of a call that does nothing (see `emit_threads`) is nowhere kept."""
    place = instruction.operands[0]
    assert isinstance(place, Mem)
    if not isinstance(place.base, Symbol) or place.base.name not in emitter.kernel.arguments:
        raise ValueError("a parameter that no call has")


def _window(emitter: Emitter, instruction: Instruction) -> None:
    """cvta: generic addresses of shared and local memory carry a window in their top bits."""
    target, source = instruction.operands[:2]
    value = emitter.source(source, "u64")
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(shape(instruction)[0], 0)
    if window:
        sign = "-" if "to" in instruction.parts else "+"
        value = f"({value} {sign} {emitter.constant(window, 'u64')})"
    emitter.assign(target, value, "u64", instruction.guard)


def _is_space(emitter: Emitter, instruction: Instruction) -> None:
    target, source = instruction.operands
    space = SPACES[instruction.parts[1]]
    top = f"({emitter.source(source, 'u64')} >> {emitter.constant(48, 'u64')})"
    shared = f"({top} == {emitter.constant(SHARED_WINDOW >> 48, 'u64')})"
    local = f"({top} == {emitter.constant(LOCAL_WINDOW >> 48, 'u64')})"
    tests = {"shared": shared, "local": local, "global": f"~({shared} | {local})"}
    emitter.assign(target, tests[space], "pred", instruction.guard)


def _policy(emitter: Emitter, instruction: Instruction) -> None:
    """A cache policy changes no value; any number will do."""
    emitter.assign(instruction.operands[0], emitter.constant(0, "u64"), "u64", instruction.guard)


_ATOMIC_WORDS = frozenset(["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"])


def _atomic(emitter: Emitter, instruction: Instruction) -> None:
    parts = instruction.parts
    space, kind, count = shape(instruction)
    operation = next(part for part in parts if part in _ATOMIC_WORDS)
    returns = parts[0] == "atom"
    rest = instruction.operands[1:] if returns else instruction.operands
    base, offset = address_of(emitter, rest[0], space)
    arguments = [
        emitter.bits(v, width(kind))
        for operand in rest[1:]
        if not is_policy(emitter, operand, parts)
        for v in emitter.targets(operand)
    ]
    sums, terms = added(emitter.kernel, instruction) or ("", ())
    arguments += [emitter.bits(term, width(kind)) for term in terms]
    site = AtomicSite(instruction, space, operation, kind, count, offset, returns, sums)
    name = emitter.named("S", site)
    guard = emitter.guard(instruction)
    if not returns:
        emitter.line(f"{name}.update(L, {base}, {guard}, ({', '.join(arguments)},), ())")
        return
    items = emitter.targets(instruction.operands[0])
    old = ", ".join(
        emitter.constant(0, raw(kind))
        if _sink(item) or instruction.guard is None
        else emitter.bits(item, width(kind))
        for item in items
    )
    emitter.line(f"t = {name}.update(L, {base}, {guard}, ({', '.join(arguments)},), ({old},))")
    for index, item in enumerate(items):
        emitter.assign(item, f"t[{index}]", raw(kind), None)


def _copy(emitter: Emitter, instruction: Instruction) -> None:
    """cp.async.{ca,cg}.shared.global: done at once; waiting for it then means nothing."""
    parts = instruction.parts
    if parts[2] in ("commit_group", "wait_group", "wait_all"):
        return
    target, source, size, *rest = instruction.operands
    if not isinstance(size, Imm):
        raise unknown(emitter.kernel, instruction)
    to, to_offset = address_of(emitter, target, "shared")
    base, offset = address_of(emitter, source, "global")
    used = [o for o in rest if not is_policy(emitter, o, parts)]
    copied = emitter.source(used[0], "u32") if used else "None"
    copy = AsyncCopy(instruction, int(size.value), to_offset, offset)
    name = emitter.named("S", copy)
    emitter.line(f"{name}.run(L, {to}, {base}, {emitter.guard(instruction)}, {copied})")


def _matrix_site(
    emitter: Emitter, instruction: Instruction, access: str, place: Operand
) -> tuple[str, str]:
    """The site of a matrix instruction and the expression of its address."""
    count = next(int(p[1]) for p in instruction.parts if p in ("x1", "x2", "x4"))
    base, offset = address_of(emitter, place, "shared")
    site = MatrixSite(instruction, access, count, offset)
    return emitter.named("S", site), base


def _load_matrices(emitter: Emitter, instruction: Instruction) -> None:
    target, place = instruction.operands
    site, base = _matrix_site(emitter, instruction, "read", place)
    emitter.line(f"t = {site}.load(L, {base}, {emitter.guard(instruction)})")
    for index, item in enumerate(emitter.targets(target)):
        emitter.assign(item, f"t[{index}]", "u32", instruction.guard)
    emitter.line("t = None")


def _store_matrices(emitter: Emitter, instruction: Instruction) -> None:
    place, source = instruction.operands
    site, base = _matrix_site(emitter, instruction, "write", place)
    values = [emitter.bits(value, 4) for value in emitter.targets(source)]
    guard = emitter.guard(instruction)
    emitter.line(f"{site}.store(L, {base}, {guard}, ({', '.join(values)},))")


HANDLERS: dict[str, Handler] = {
    "mov": _move,
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "cvta": _window,
    "atom": _atomic,
    "red": _atomic,
    "createpolicy": _policy,
    "isspacep": _is_space,
    "cp": _copy,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
}
"""The function that emits each family of this module."""
