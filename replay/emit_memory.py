"""Code for the instructions that move data: mov, ld, st, cvta, atomics and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from twinstep.replay.access import LOCAL_WINDOW, SHARED_WINDOW, Site
from twinstep.replay.atomics import AtomicSite
from twinstep.replay.dtypes import NUMPY, Array, raw, width
from twinstep.replay.flow import family
from twinstep.replay.generic import AsyncCopy, GenericSite
from twinstep.replay.lanes import Lanes
from twinstep.replay.matrices import MatrixSite
from twinstep.replay.parameters import ParameterSite
from twinstep.replay.registers import unknown
from twinstep.replay.syntax import Imm, Instruction, Mem, Operand, Reg, Symbol, Vec

if TYPE_CHECKING:
    from twinstep.replay.emit import Emitter

_SPACES = {
    "global": "global",
    "const": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "local": "local",
    "param": "param",
}
_QUALIFIERS = frozenset(
    ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "nc")
    + ("cta", "cluster", "gpu", "sys")
    + ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
)
_NOTHING = frozenset(
    ("membar", "fence", "prefetch", "prefetchu", "griddepcontrol", "nanosleep", "setmaxnreg")
    + ("pmevent", "discard", "applypriority")
    + ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
)


def emit(emitter: Emitter, instruction: Instruction) -> bool:
    """Emit a data-moving instruction; False if it is none."""
    head, opcode = family(instruction), instruction.opcode
    if opcode in _NOTHING or head in _NOTHING:
        return True
    handler = HANDLERS.get(head)
    if handler is None:
        return False
    handler(emitter, instruction)
    return True


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


def _shape(emitter: Emitter, instruction: Instruction) -> tuple[str, str, int]:
    """Space ("" when generic), element type and vector length of a load or store."""
    space, count = "", 1
    for part in instruction.parts[1:-1]:
        if part in _SPACES:
            space = _SPACES[part]
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part not in _QUALIFIERS and not part.startswith(("L1::", "L2::")):
            raise unknown(emitter.kernel, instruction)
    kind = instruction.parts[-1]
    if kind not in NUMPY:
        raise unknown(emitter.kernel, instruction)
    return space, kind, count


def _address(emitter: Emitter, operand: Operand, space: str) -> tuple[str, int]:
    """The expression of a base address and the constant to add."""
    assert isinstance(operand, Mem)
    wide = "u64" if space in ("global", "") else "u32"
    if operand.base is None:
        return emitter.constant(0, wide), operand.offset
    if isinstance(operand.base, Symbol):
        return emitter.constant(emitter.address_of(operand.base), wide), operand.offset
    own = width(emitter.types.kind(operand.base.name))
    return emitter.source(operand.base, "u64" if own == 8 else wide), operand.offset


def _site(
    instruction: Instruction, access: str, space: str, size: int, count: int, offset: int
) -> Site | GenericSite:
    if space == "":
        return GenericSite(instruction, access, size, count, offset)
    return Site(instruction, access, space, size, count, offset)


def _guard(emitter: Emitter, instruction: Instruction) -> str:
    return "None" if instruction.guard is None else emitter.source(instruction.guard, "pred")


def _load(emitter: Emitter, instruction: Instruction) -> None:
    space, kind, count = _shape(emitter, instruction)
    items = emitter.targets(instruction.operands[0])
    if space == "param":
        _load_parameter(emitter, instruction, kind, items)
        return
    base, offset = _address(emitter, instruction.operands[1], space)
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
    emitter.line(f"t = {site}.load(L, {base}, {_guard(emitter, instruction)}, {olds})")
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
    if isinstance(place.base, Symbol) and place.base.name not in emitter.layout.params:
        for item in items:  # the result of a call that did nothing
            emitter.assign(item, emitter.constant(0, raw(kind)), raw(kind), instruction.guard)
        return
    if not isinstance(place.base, Symbol):
        site = emitter.named("S", ParameterSite(instruction, width(kind), len(items)))
        base, offset = _address(emitter, place, "")
        address = f"({base} + {emitter.constant(offset, 'u64')})"
        emitter.line(f"t = {site}.load(L, {address}, {_guard(emitter, instruction)})")
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
    space, kind, count = _shape(emitter, instruction)
    if space == "param":
        return
    base, offset = _address(emitter, instruction.operands[0], space)
    values = [emitter.bits(v, width(kind)) for v in emitter.targets(instruction.operands[1])]
    site = emitter.named("S", _site(instruction, "write", space, width(kind), count, offset))
    guard = _guard(emitter, instruction)
    emitter.line(f"{site}.store(L, {base}, {guard}, ({', '.join(values)},))")


def _window(emitter: Emitter, instruction: Instruction) -> None:
    """cvta: generic addresses of shared and local memory carry a window in their top bits."""
    target, source = instruction.operands[:2]
    parts = instruction.parts
    space = next((p for p in parts if p in _SPACES), "global")
    value = emitter.source(source, "u64")
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(_SPACES[space], 0)
    if window:
        sign = "-" if "to" in parts else "+"
        value = f"({value} {sign} {emitter.constant(window, 'u64')})"
    emitter.assign(target, value, "u64", instruction.guard)


def _is_space(emitter: Emitter, instruction: Instruction) -> None:
    target, source = instruction.operands
    space = instruction.parts[1].split("::")[0]
    top = f"({emitter.source(source, 'u64')} >> {emitter.constant(48, 'u64')})"
    shared = f"({top} == {emitter.constant(SHARED_WINDOW >> 48, 'u64')})"
    local = f"({top} == {emitter.constant(LOCAL_WINDOW >> 48, 'u64')})"
    test = {"shared": shared, "local": local, "global": f"~({shared} | {local})"}.get(space)
    if test is None:
        raise unknown(emitter.kernel, instruction)
    emitter.assign(target, test, "pred", instruction.guard)


def _policy(emitter: Emitter, instruction: Instruction) -> None:
    """A cache policy changes no value; any number will do."""
    emitter.assign(instruction.operands[0], emitter.constant(0, "u64"), "u64", instruction.guard)


_ATOMIC_WORDS = frozenset(["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"])


def _atomic(emitter: Emitter, instruction: Instruction) -> None:
    parts, kind = instruction.parts, instruction.parts[-1]
    operation, space, count = "", "", 1
    for part in parts[1:-1]:
        if part in _ATOMIC_WORDS:
            operation = part
        elif part in _SPACES:
            space = _SPACES[part]
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part not in _QUALIFIERS | {"noftz", "ftz"} and not part.startswith("L2::"):
            raise unknown(emitter.kernel, instruction)
    returns = parts[0] == "atom"
    rest = instruction.operands[1:] if returns else instruction.operands
    base, offset = _address(emitter, rest[0], space)
    arguments = [
        emitter.bits(v, width(kind))
        for operand in rest[1:]
        if not _is_policy(emitter, operand, parts)
        for v in emitter.targets(operand)
    ]
    site = AtomicSite(instruction, space, operation, kind, count, offset, returns)
    name = emitter.named("S", site)
    guard = _guard(emitter, instruction)
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


def _is_policy(emitter: Emitter, operand: Operand, parts: tuple[str, ...]) -> bool:
    """The trailing cache-policy register of an access with a cache hint."""
    hinted = any(part.startswith("L2::") for part in parts)
    return (
        hinted
        and isinstance(operand, Reg)
        and emitter.types.kind(operand.name) == "u64"
        and (width(parts[-1]) != 8)
    )


def _copy(emitter: Emitter, instruction: Instruction) -> None:
    """cp.async.{ca,cg}.shared.global: done at once; waiting for it then means nothing."""
    parts = instruction.parts
    if parts[1] != "async" or not any(p.startswith("shared") for p in parts) or "bulk" in parts:
        raise unknown(emitter.kernel, instruction)
    target, source, size, *rest = instruction.operands
    if not isinstance(size, Imm):
        raise unknown(emitter.kernel, instruction)
    to, to_offset = _address(emitter, target, "shared")
    base, offset = _address(emitter, source, "global")
    used = [o for o in rest if not _is_policy(emitter, o, parts)]
    copied = emitter.source(used[0], "u32") if used else "None"
    copy = AsyncCopy(instruction, int(size.value), to_offset, offset)
    name = emitter.named("S", copy)
    emitter.line(f"{name}.run(L, {to}, {base}, {_guard(emitter, instruction)}, {copied})")


def _matrix_site(
    emitter: Emitter, instruction: Instruction, access: str, place: Operand
) -> tuple[str, str]:
    """The site of a matrix instruction and the expression of its address."""
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if set(instruction.parts[1:]) - known or "m8n8" not in instruction.parts:
        raise unknown(emitter.kernel, instruction)
    count = next(int(p[1]) for p in instruction.parts if p in ("x1", "x2", "x4"))
    base, offset = _address(emitter, place, "shared")
    site = MatrixSite(instruction, access, count, offset)
    return emitter.named("S", site), base


def _load_matrices(emitter: Emitter, instruction: Instruction) -> None:
    target, place = instruction.operands
    site, base = _matrix_site(emitter, instruction, "read", place)
    emitter.line(f"t = {site}.load(L, {base}, {_guard(emitter, instruction)})")
    for index, item in enumerate(emitter.targets(target)):
        emitter.assign(item, f"t[{index}]", "u32", instruction.guard)
    emitter.line("t = None")


def _store_matrices(emitter: Emitter, instruction: Instruction) -> None:
    place, source = instruction.operands
    site, base = _matrix_site(emitter, instruction, "write", place)
    values = [emitter.bits(value, 4) for value in emitter.targets(source)]
    guard = _guard(emitter, instruction)
    emitter.line(f"{site}.store(L, {base}, {guard}, ({', '.join(values)},))")


HANDLERS: dict[str, Callable[[Emitter, Instruction], None]] = {
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
"""What emits each family of this module."""
