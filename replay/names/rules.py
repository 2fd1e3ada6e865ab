"""Rules of names for each family of instructions that is no plain expression of its operands."""

from __future__ import annotations

from dataclasses import replace

from twinstep.replay.dtypes import width
from twinstep.replay.isa.forms import resolve
from twinstep.replay.names.emit import IGNORED, NamingEmitter, computed, gather, nothing
from twinstep.replay.names.normal import canonical_opcode
from twinstep.replay.ptx.flow import family, used
from twinstep.replay.ptx.syntax import Instruction, Operand, Reg, Symbol, Vec
from twinstep.replay.shadow64 import emit_moves
from twinstep.replay.shadow64.emit import LiftedEmitter, Rule
from twinstep.replay.shadow64.values import granules
from twinstep.replay.translate.addresses import address_of, shape

COMBINE = frozenset(("and", "or", "xor"))


def _naming(emitter: LiftedEmitter) -> NamingEmitter:
    assert isinstance(emitter, NamingEmitter)
    return emitter


def _refuse(emitter: LiftedEmitter, instruction: Instruction) -> None:
    _naming(emitter).refuse(instruction)


def _unname(emitter: LiftedEmitter, instruction: Instruction) -> None:
    _naming(emitter).unname(instruction)


def _compare(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """setp, with what it is combined with and its second result."""
    naming, parts = _naming(emitter), instruction.parts
    kind = parts[-1]
    if kind.endswith("x2"):
        naming.refuse(instruction)
        return
    sources = instruction.operands[1:3]
    suffix = ".".join((*(p for p in parts[2:-1] if p == "ftz"), kind))
    bits = ", ".join(emitter.typed(operand, kind) for operand in sources)
    names = ", ".join(emitter.shadow_of(operand) for operand in sources)
    place = naming.place(instruction)
    found = f"s_compared({parts[1]!r}, {suffix!r}, {kind!r}, {place}, ({bits},), {names})"
    targets = emitter.targets(instruction.operands[0])
    results = [found, f"s_inverted({found})"]
    word = next((p for p in parts[2:-1] if p in COMBINE), "")
    if word:
        other = instruction.operands[3]
        plain = emitter.source(other, "pred")
        a, b = (emitter.typed(operand, kind) for operand in sources)
        function = emitter.function_name(_comparison(instruction))
        values = (f"{function}({a}, {b})", f"~{function}({a}, {b})")
        results = [
            f"s_logic({word!r}, {place}, ({value}, {plain}), {r}, {emitter.shadow_of(other)})"
            for value, r in zip(values, results, strict=True)
        ]
    for target, result in zip(targets, results, strict=False):
        emitter.give(target, result, instruction)


def _comparison(instruction: Instruction) -> object:
    parts = [p for p in instruction.parts if p not in COMBINE]
    operation = resolve(".".join(parts))
    assert operation is not None
    return operation.first


def _move(emitter: LiftedEmitter, instruction: Instruction) -> None:
    if instruction.parts[-1] == "pred":
        emitter.give(
            instruction.operands[0], emitter.shadow_of(instruction.operands[1]), instruction
        )
        return
    parts = [o for o in instruction.operands if isinstance(o, Vec)]
    if any(width(instruction.parts[-1]) < 2 * len(vec.items) for vec in parts):
        _refuse(emitter, instruction)  # bytes
        return
    emit_moves.move(emitter, instruction)


def _select(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """selp: one of two, by a predicate."""
    naming = _naming(emitter)
    target, a, b, condition = instruction.operands
    if not isinstance(target, Reg) or not emitter.has_shadow(target.name):
        return
    kind = f"b{8 * width(instruction.parts[-1])}"
    bits = f"({emitter.source(a, _raw(kind))}, {emitter.source(b, _raw(kind))})"
    flags = emitter.source(condition, "pred")
    names = ", ".join(emitter.shadow_of(operand) for operand in (condition, a, b))
    size = granules(width(kind))
    place = naming.place(instruction)
    expression = f"s_selected({size}, {place}, {flags}, {bits}, {names})"
    emitter.give(target, expression, instruction)


def _raw(kind: str) -> str:
    return "u" + kind[1:]


def _logic(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """and, or, xor, not: of predicates, or granule by granule."""
    naming, word = _naming(emitter), family(instruction)
    kind, sources = instruction.parts[-1], instruction.operands[1:]
    names = ", ".join(emitter.shadow_of(operand) for operand in sources)
    place = naming.place(instruction)
    if kind == "pred":
        bits = ", ".join(emitter.source(operand, "pred") for operand in sources)
        found = f"s_logic({word!r}, {place}, ({bits},), {names})"
        emitter.give(instruction.operands[0], found, instruction)
    elif word == "not":
        computed(emitter, instruction)
    else:
        bits = ", ".join(emitter.source(operand, _raw(kind)) for operand in sources)
        size = granules(width(kind))
        found = f"s_split({word!r}, {size}, {place}, ({bits},), {names})"
        emitter.give(instruction.operands[0], found, instruction)


def _convert(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Conversions: packed pairs by their halves, integers of other widths by their granules."""
    naming, parts = _naming(emitter), instruction.parts
    target, source = parts[-2:]
    integers = target[0] in "us" and source[0] in "us" and "sat" not in parts
    if target in ("f16x2", "bf16x2") and source == "f32":
        _pack(naming, instruction)
    elif integers and _moves(target, source):
        emit_moves.resized(emitter, instruction)
    else:
        computed(emitter, instruction)


def _moves(target: str, source: str) -> bool:
    """True if an integer conversion keeps the low granules and adds zeros at most."""
    grows = width(target) > width(source)
    return min(width(target), width(source)) >= 2 and not (grows and source[0] == "s")


def _pack(naming: NamingEmitter, instruction: Instruction) -> None:
    opcode = canonical_opcode(instruction.opcode).replace("x2", "")
    place = naming.place(instruction)
    found = []
    for operand in instruction.operands[:0:-1]:
        bits, names = naming.typed(operand, "f32"), naming.shadow_of(operand)
        found.append(
            f"(s_computed({opcode!r}, ('f32',), 'b16', 1, {place}, ({bits},), {names}), 1)"
        )
    naming.give(instruction.operands[0], f"s_packed(({', '.join(found)}), 2)", instruction)


def _shift(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Shifts by whole granules move codes; others are expressions."""
    amount, kind = instruction.operands[2], instruction.parts[-1]
    value = getattr(amount, "value", None)
    signed = kind[0] == "s" and family(instruction) == "shr"
    if isinstance(value, int) and value % 16 == 0 and not signed and width(kind) >= 4:
        emit_moves.shift(emitter, instruction)
    else:
        computed(emitter, instruction)


def _permute(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """prmt: of whole granules bits move, inside a sum too."""
    naming = _naming(emitter)
    value = getattr(instruction.operands[3], "value", None)
    nibbles = [value >> 4 * i & 15 for i in range(4)] if isinstance(value, int) else []
    pairs = list(zip(nibbles[::2], nibbles[1::2], strict=True))
    if not pairs or any(low % 2 or high != low + 1 or low > 6 for low, high in pairs):
        (gather if naming.place_in_sum(instruction) else computed)(emitter, instruction)
    else:
        emit_moves.permute(emitter, instruction)


def _shuffle(emitter: LiftedEmitter, instruction: Instruction) -> None:
    naming = _naming(emitter)
    names = ", ".join(emitter.shadow_of(operand) for operand in instruction.operands[2:])
    emitter.line(f"s_concrete({naming.place(instruction)}, {names})")
    emit_moves.shuffle(emitter, instruction)


def _reduce(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Redux of integers."""
    naming, parts = _naming(emitter), instruction.parts
    kind = parts[-1]
    if kind == "f32":
        naming.refuse(instruction)
        return
    op = next(p for p in parts if p in ("add", "min", "max", *COMBINE))
    target, operand, mask = instruction.operands
    place, names = naming.place(instruction), naming.shadow_of(operand)
    bits, mask_bits = emitter.source(operand, _raw(kind)), emitter.source(mask, "u32")
    naming.line(f"s_concrete({place}, {naming.shadow_of(mask)})")
    found = f"s_reduced(L, {op!r}, {kind!r}, {place}, {bits}, {names}, {mask_bits})"
    naming.give(target, found, instruction)


def _places(
    naming: NamingEmitter, instruction: Instruction, place: Operand, space: str
) -> tuple[str, str]:
    """Emit which threads access memory, and where; names of both, and of the memory."""
    base, offset = address_of(naming, place, space)
    register = getattr(place, "base", None)
    if isinstance(register, Reg):
        names = naming.shadow_of(register)
        if names != "None":
            naming.line(f"s_concrete({naming.place(instruction)}, {names})")
    name, guard = f"q{len(naming.lines)}", naming.guard(instruction)
    site = naming.place(instruction)
    naming.line(f"{name} = s_access(L, {space!r}, {base}, {offset}, {guard}, {site})")
    return name, f"s_memory(L, {space!r})"


def _load(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """A load finds the names that were stored with these bits."""
    naming = _naming(emitter)
    space, kind, _ = shape(instruction)
    items = emitter.targets(instruction.operands[0])
    if "const" in instruction.parts:
        naming.unname(instruction)
        return
    if space == "param":
        _parameter(naming, instruction)
        return
    word, guard = width(kind), emitter.guard(instruction)
    at, memory = _places(naming, instruction, instruction.operands[1], space)
    held = f"{at}_g"
    if guard != "None":
        emitter.line(f"{held} = {guard}")
    for index, item in enumerate(items):
        if not isinstance(item, Reg) or item.name == "_" or not emitter.has_shadow(item.name):
            continue

        def finish(item: Reg = item, index: int = index) -> None:
            name, size = f"h{emitter.slot(item.name)}", emitter.size(item.name)
            own = max(word // 2, 1)
            bits = emitter.bits(item, max(word, 2))
            new = (
                f"s_load({memory}, L, {at}[0], {at}[1] + {index * word}, {word}, {bits}, "
                f"{naming.place(instruction)})"
            )
            if size > own and kind[0] == "s":
                extended = f"cvt.s{16 * size}.s{16 * own}"
                kinds = f"('s{16 * own}',), 's{16 * size}'"
                place = naming.place(instruction)
                new = f"s_computed({extended!r}, {kinds}, 1, {place}, ({bits},), {new})"
            elif size != own:
                new = f"s_packed((({new}, {own}),), {size})"
            if guard != "None":
                new = f"s_merged({held}, {new}, {name}, {size})"
            emitter.line(f"{name} = {new}")

        emitter.after.append(finish)


def _parameter(naming: NamingEmitter, instruction: Instruction) -> None:
    """A load of parameters, some of which are numbers of the host that have names."""
    place, kind = instruction.operands[1], instruction.parts[-1]
    base, site = getattr(place, "base", None), naming.place(instruction)
    start = naming.layout.params.get(base.name) if isinstance(base, Symbol) else None
    if start is None:
        if not isinstance(base, Symbol):
            naming.line(f"s_unnamed_parameters(L, {site})")
        naming.unname(instruction)
        return
    start += getattr(place, "offset", 0)
    for index, item in enumerate(naming.targets(instruction.operands[0])):
        if isinstance(item, Reg) and item.name != "_" and naming.has_shadow(item.name):
            at, size = start + index * width(kind), naming.size(item.name)
            names = f"s_parameter(L, {at}, {width(kind)}, {size}, {kind[0] == 's'}, {site})"
            naming.give(item, names, instruction)


def _store(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """A store puts the names beside the memory."""
    naming = _naming(emitter)
    space, kind, _ = shape(instruction)
    if space == "param":
        naming.refuse(instruction)
        return
    word = width(kind)
    at, memory = _places(naming, instruction, instruction.operands[0], space)
    for index, item in enumerate(emitter.targets(instruction.operands[1])):
        bits, names = emitter.bits(item, word), emitter.shadow_of(item)
        emitter.line(
            f"s_store({memory}, L, {at}[0], {at}[1] + {index * word}, {word}, {bits}, {names}, "
            f"{naming.place(instruction)})"
        )


def _matrices(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """Ldmatrix: each register has two items of shared memory."""
    naming = _naming(emitter)
    items, place = naming.targets(instruction.operands[0]), instruction.operands[1]
    if instruction.guard is not None:
        naming.refuse(instruction)
        return
    base, offset = address_of(naming, place, "shared")
    site, name = naming.place(instruction), f"q{len(naming.lines)}"
    transposed = "trans" in instruction.parts
    naming.line(f"{name} = s_matrix_items(L, {base}, {len(items)}, {transposed}, {offset})")
    for index, item in enumerate(items):
        assert isinstance(item, Reg)

        def finish(item: Reg = item, index: int = index) -> None:
            bits = emitter.bits(item, 4)
            found = f"s_matrix(s_memory(L, 'shared'), L, {name}[{index}], {bits}, {site})"
            emitter.line(f"h{emitter.slot(item.name)} = {found}")

        emitter.after.append(finish)


def _atomic(emitter: LiftedEmitter, instruction: Instruction) -> None:
    """An atomic of plain operands on plain memory, or an exchange; other names are refused."""
    naming = _naming(emitter)
    returns = instruction.parts[0] == "atom"
    kind = instruction.parts[-1]
    swaps = "exch" in instruction.parts
    space = "shared" if any(p.startswith("shared") for p in instruction.parts) else "global"
    place = instruction.operands[1 if returns else 0]
    if naming.place_in_sum(instruction) and not swaps:
        _added(naming, instruction, place, space, width(kind))
        return
    naming.refuse(instruction)
    at, memory = _places(naming, instruction, place, space)
    emitter.line(f"s_clear({memory}, {at}[1], {width(kind)}, {naming.place(instruction)}, {swaps})")
    target = instruction.operands[0]
    if returns and swaps and isinstance(target, Reg) and emitter.has_shadow(target.name):
        size, own = emitter.size(target.name), f"h{emitter.slot(target.name)}"
        old = "None" if instruction.guard is None else own
        naming.after.append(lambda: naming.line(f"{own} = s_unknown(L, {at}[0], {old}, {size})"))


def _added(
    naming: NamingEmitter, instruction: Instruction, place: Operand, space: str, word: int
) -> None:
    """An atomic inside a sum: memory, and what it found there, have the mix of all operands."""
    at, memory = _places(naming, replace(instruction, guard=None), place, space)
    base = getattr(place, "base", None)
    names = [naming.shadow_of(Reg(n)) for n in used(instruction) if Reg(n) != base]
    listed = "".join(f", {name}" for name in names)
    site = naming.place(instruction)
    naming.line(f"s_added({memory}, L, {at}[0], {at}[1], {word}, {site}{listed})")
    for target in naming.targets(instruction.operands[0]):
        if instruction.parts[0] == "atom" and isinstance(target, Reg):
            size = naming.size(target.name)
            naming.give(target, f"s_gathered_by_all({size}{listed})", instruction)


RULES: dict[str, Rule] = {
    **dict.fromkeys(IGNORED, nothing),
    **dict.fromkeys(("activemask", "elect"), _unname),
    **dict.fromkeys(("vote", "match", "bar", "barrier", "call", "trap"), _refuse),
    **dict.fromkeys(("cp", "stmatrix", "cvta", "isspacep", "createpolicy"), _refuse),
    **dict.fromkeys(("and", "or", "xor", "not"), _logic),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("ld", "ldu"), _load),
    **dict.fromkeys(("atom", "red"), _atomic),
    "st": _store,
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvt": _convert,
    "prmt": _permute,
    "shfl": _shuffle,
    "redux": _reduce,
    "ldmatrix": _matrices,
}
"""What happens to names, by family; `computed` for every other pure instruction."""
