"""Names of registers, as the code of a named kernel computes with them.

A register's names are an array of one field, its codes, in the shape that the register has; None
where no lane has any. Values of a type are read out of them, computed with, and put back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array
from twinstep.replay.machine.lanes import Lanes
from twinstep.replay.machine.warp import shuffle
from twinstep.replay.names.session import NotNamed, session
from twinstep.replay.names.table import PLAIN

CODES = {g: np.dtype([("n", "i8", (g,))]) for g in (1, 2, 3, 4)}
Names = Array | None
NEGATED = {"ne": "equ", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
SWAPPED = {"gt": "lt", "ge": "le", "hi": "lo", "hs": "ls"}


def named(names: Names) -> bool:
    """True if a lane has a name."""
    return names is not None and bool((names["n"] >= 0).any())


def plain(g: int) -> Array:
    """The names of a register without any."""
    return wrapped(np.full((1, 1, g), PLAIN, np.int64))


def kept(names: Names, g: int) -> Array:
    """Names for the register file."""
    return plain(g) if names is None else names


def wrapped(codes: Array) -> Array:
    """Codes, granules along the last axis, as names."""
    result = np.empty(codes.shape[:-1], CODES[codes.shape[-1]])
    result["n"] = codes
    return result


def halves(bits: Array) -> Array:
    """A register's bits as granules, lowest first, on a new last axis."""
    size = bits.dtype.itemsize
    if size == 1:
        return bits.astype(np.uint16)[..., None]
    whole = np.ascontiguousarray(bits)
    return whole.view(np.uint16).reshape(*whole.shape, size // 2)


def resolved(bits: Array, names: Names, g: int) -> Array:
    """Codes of a register; plain granules as constants; lanes without any name stay plain."""
    own = halves(bits)[..., :g]
    if names is None:
        return np.full(own.shape, PLAIN, np.int64)
    codes = names["n"][..., :g]
    shape = np.broadcast_shapes(codes.shape, own.shape)
    codes, own = np.broadcast_to(codes, shape), np.broadcast_to(own, shape)
    some = (codes >= 0).any(-1, keepdims=True) & (codes < 0)
    if some.any():
        codes = codes.copy()
        codes[some] = 4 * session().table.consts(own[some], 1)
    return codes


def value(bits: Array, names: Names, kind: str, part: int = 0) -> Array:
    """Numbers of the values of a type; -1 where a lane has no name."""
    if kind == "pred":
        return np.full((1, 1), -1) if names is None else names["n"][..., 0] >> 2
    g = max(NUMPY[kind].itemsize // 2, 1)
    codes = resolved(bits, names, g * (part + 1))[..., g * part :]
    found = np.full(codes.shape[:-1], -1, np.int64)
    lanes = (codes >= 0).any(-1)
    if lanes.any():
        found[lanes] = session().table.values(_constant_where_plain(codes, bits, g, part)[lanes])
    return found


def _constant_where_plain(codes: Array, bits: Array, g: int, part: int) -> Array:
    if (codes >= 0).all():
        return codes
    own = np.broadcast_to(halves(bits)[..., g * part : g * (part + 1)], codes.shape)
    missing = codes < 0
    codes = codes.copy()
    codes[missing] = 4 * session().table.consts(own[missing], 1)
    return codes


def complete(numbers: Sequence[Array], bits: Sequence[Array], kinds: Sequence[str]) -> list[Array]:
    """Operands with constants where they are plain and another operand is not; else -1."""
    shape = np.broadcast_shapes(*(n.shape for n in numbers), *(b.shape for b in bits))
    some = np.zeros(shape, np.bool_)
    for n in numbers:
        some |= n >= 0
    result = []
    for n, b, kind in zip(numbers, bits, kinds, strict=True):
        whole = np.broadcast_to(n, shape).copy()
        missing = some & (whole < 0)
        if missing.any():
            if kind == "pred":
                unsigned, g = np.broadcast_to(b, shape).astype(np.uint8), 0
            else:
                unsigned = np.broadcast_to(b, shape)
                size = unsigned.dtype.itemsize
                unsigned, g = np.ascontiguousarray(unsigned).view(f"u{size}"), max(size // 2, 1)
            whole[missing] = session().table.consts(unsigned[missing], g)
        result.append(np.where(some, whole, -1))
    return result


def put(numbers: Array, g: int) -> Names:
    """Names of a register from the numbers of values; a predicate has one code."""
    if not (numbers >= 0).any():
        return None
    if g == 0:
        return wrapped(np.where(numbers < 0, PLAIN, 4 * numbers)[..., None])
    return wrapped(session().table.codes(numbers, g))


def computed(
    opcode: str,
    kinds: Sequence[str],
    result: str,
    lanes: int,
    site: str,
    bits: Sequence[Array],
    *names: Names,
) -> Names:
    """Names of a pure instruction's result; `lanes` values are packed in each register."""
    if not any(named(n) for n in names):
        return None
    table = session().table
    g = 0 if result == "pred" else max(NUMPY[result].itemsize // 2, 1)
    found = []
    for lane in range(lanes):
        own = [value(b, n, k, lane) for b, n, k in zip(bits, names, kinds, strict=True)]
        parts = [_part(b, k, lane) for b, k in zip(bits, kinds, strict=True)]
        found.append(table.each(opcode, complete(own, parts, kinds), g, site))
    if lanes == 1:
        return put(found[0], g)
    return packed([(put(numbers, g), g) for numbers in found], g * lanes)


def _part(bits: Array, kind: str, lane: int) -> Array:
    if kind == "pred":
        return bits
    size = NUMPY[kind].itemsize
    if bits.dtype.itemsize == size:
        return bits
    part = halves(bits)[..., lane * size // 2 : (lane + 1) * size // 2]
    return np.ascontiguousarray(part).view(f"u{size}")[..., 0]


def compared(
    word: str, suffix: str, kind: str, site: str, bits: Sequence[Array], *names: Names
) -> Names:
    """Names of a comparison's first result, from its ordered forms and their negations."""
    if not any(named(n) for n in names):
        return None
    numbers = [value(b, n, kind) for b, n in zip(bits, names, strict=True)]
    return put(comparison(word, suffix, complete(numbers, bits, (kind, kind)), site), 0)


def comparison(word: str, kind: str, numbers: Sequence[Array], site: str) -> Array:
    """Numbers of a comparison of values."""
    table = session().table
    a, b = numbers
    if kind.split(".")[-1][0] not in "fb" or kind[0] == "b" and kind != "bf16":
        negated = {"ne": "eq", "ge": "lt", "gt": "le", "hs": "lo", "hi": "ls"}
        if word in negated:
            return table.each("not", [comparison(negated[word], kind, numbers, site)], 0, site)
        return table.each(f"{word}.{kind}", (a, b), 0, site)
    if word == "num":
        both = [table.each(f"eq.{kind}", (x, x), 0, site) for x in (a, b)]
        return table.each("and", both, 0, site)
    if word in ("nan", "equ", "ne"):
        order = comparison("num", kind, numbers, site)
        unordered = table.each("not", [order], 0, site)
        if word == "nan":
            return unordered
        equal = table.each(f"eq.{kind}", (a, b), 0, site)
        if word == "equ":
            return table.each("or", (equal, unordered), 0, site)
        return table.each("and", (order, table.each("not", [equal], 0, site)), 0, site)
    if word in NEGATED:
        return table.each("not", [comparison(NEGATED[word], kind, numbers, site)], 0, site)
    if word in SWAPPED:
        word, a, b = SWAPPED[word], b, a
    return table.each(f"{word}.{kind}", (a, b), 0, site)


def logic(word: str, site: str, bits: Sequence[Array], *names: Names) -> Names:
    """Names of `and`, `or`, `xor`, `not` of predicates."""
    if not any(named(n) for n in names):
        return None
    numbers = [value(b, n, "pred") for b, n in zip(bits, names, strict=True)]
    whole = complete(numbers, bits, ("pred",) * len(bits))
    return put(session().table.each(word, whole, 0, site), 0)


def inverted(names: Names) -> Names:
    """Names of a negated predicate."""
    return logic("not", "", (np.zeros((1, 1), np.bool_),), names)


def selected(
    g: int, site: str, condition: Array, bits: Sequence[Array], chooser: Names, *names: Names
) -> Names:
    """Names of one of two registers, by a predicate."""
    if not named(chooser):
        return merged(condition, names[0], names[1], g)
    table = session().table
    kind = {1: "u16", 2: "u32", 4: "u64"}[g]
    conditions = value(condition, chooser, "pred")
    pair = [value(b, n, kind) for b, n in zip(bits, names, strict=True)]
    flags, a, b = complete([conditions, *pair], [condition, *bits], ("pred", kind, kind))
    return put(table.each("if", (flags, a, b), g, site), g)


def decided(flags: Array, names: Names, site: str, inside: bool = False) -> None:
    """Note every named predicate that is about to be decided by its value.

    Raises:
        NotNamed: it depends on a sum, and is not inside one.
    """
    if not named(names):
        return
    assert names is not None
    numbers, outcomes = np.broadcast_arrays(names["n"][..., 0] >> 2, flags)
    for number, outcome in set(zip(numbers.flat, outcomes.flat, strict=True)):
        if number < 0 or inside and session().table.rows[int(number)].op == "mix":
            continue
        found = session().sums.left(session().table, int(number), int(outcome), 0)
        if session().table.rows[found].op == "mix":
            raise NotNamed(f"a branch depends on a sum: {site}", "names", site)
        session().decide(found, bool(outcome), site)


def concrete(site: str, *names: Names) -> None:
    """Refuse names where bits must be known: addresses, masks of threads.

    Raises:
        NotNamed: naming the instruction.
    """
    if any(named(n) for n in names):
        raise NotNamed(f"an address or a mask of threads depends on data: {site}", "names", site)


def refused(site: str, *names: Names) -> None:
    """Refuse names in an instruction that is not followed.

    Raises:
        NotNamed: naming the instruction.
    """
    if any(named(n) for n in names):
        raise NotNamed(f"names are not followed through {site}", "names", site)


def merged(guard: Array | None, new: Names, old: Names, g: int) -> Names:
    """The new names where the guard holds, else the old ones."""
    if guard is None:
        return new
    if new is None and old is None:
        return None
    a, b = (plain(g) if n is None else n for n in (new, old))
    flags = np.asarray(guard)
    return wrapped(np.where(flags[..., None], a["n"], b["n"]))


def sliced(names: Names, start: int, g: int) -> Names:
    """Some granules of a register."""
    return None if names is None else wrapped(names["n"][..., start : start + g])


def packed(parts: Sequence[tuple[Names, int]], g: int) -> Names:
    """A register put together from names and their numbers of granules, lowest first."""
    known = [names for names, _ in parts if names is not None]
    if not known:
        return None
    shape = np.broadcast_shapes(*(names.shape for names in known))
    codes, start = np.full((*shape, g), PLAIN, np.int64), 0
    for names, size in parts:
        if names is not None:
            codes[..., start : start + size] = names["n"][..., :size]
        start += size
    return wrapped(codes)


def split(word: str, g: int, site: str, bits: Sequence[Array], *names: Names) -> Names:
    """Names of `and`, `or`, `xor` of registers: granule by granule where one side is plain."""
    if not any(named(n) for n in names):
        return None
    a, b = (plain(g)["n"] if n is None else n["n"] for n in names)
    x, y = (halves(part) for part in bits)
    codes = np.full(np.broadcast_shapes(a.shape, b.shape, x.shape, y.shape), PLAIN - 1)
    for own, other, mask in ((a, b, y), (b, a, x)):
        settled = {
            "and": ((mask == 0xFFFF, own), (mask == 0, np.int64(PLAIN))),
            "or": ((mask == 0, own), (mask == 0xFFFF, np.int64(PLAIN))),
            "xor": ((mask == 0, own),),
        }[word]
        for where, result in settled:
            codes = np.where((other < 0) & where & (codes < PLAIN), result, codes)
    codes = np.where((a < 0) & (b < 0), PLAIN, codes)
    if (codes >= PLAIN).all():
        return wrapped(codes)
    kind = {1: "b16", 2: "b32", 4: "b64"}[g]
    whole = computed(f"{word}.{kind}", (kind, kind), kind, 1, site, bits, *names)
    rest = kept(whole, g)["n"]
    done = (codes >= PLAIN).all(-1, keepdims=True)
    return wrapped(np.where(done, codes, rest))


def reduced(
    lanes: Lanes, op: str, kind: str, site: str, bits: Array, names: Names, mask: Array
) -> Names:
    """Names of an integer reduction over whole warps: every order has these bits.

    Raises:
        NotNamed: some threads take no part.
    """
    if not named(names):
        return None
    if lanes.ids is not None or lanes.shape[1] % 32 or (mask != 0xFFFFFFFF).any():
        raise NotNamed(f"a reduction over some threads of a warp: {site}", "names", site)
    whole = complete([value(bits, names, kind)], [bits], (kind,))[0]
    flat = np.broadcast_to(whole, lanes.shape).reshape(-1, 32)
    # Lanes without a name beside lanes with one are constants.
    values = np.broadcast_to(bits, lanes.shape).reshape(-1, 32)
    mixed = (flat >= 0).any(-1, keepdims=True) & (flat < 0)
    if mixed.any():
        flat = flat.copy()
        flat[mixed] = session().table.consts(values[mixed], 2)
    total = flat[:, 0]
    for lane in range(1, 32):
        total = session().table.each(f"{op}.{kind}", (total, flat[:, lane]), 2, site)
    return put(np.repeat(total[:, None], 32, axis=1).reshape(lanes.shape), 2)


def exchanged(lanes: Lanes, mode: str, names: Names, b: Array, c: Array, g: int) -> Names:
    """Names of a shuffle."""
    if names is None:
        return None
    own = np.arange(lanes.size, dtype=np.uint32).reshape(lanes.shape)
    source, _ = shuffle(mode, lanes, own, b, c)
    flat = np.broadcast_to(names["n"], (*lanes.shape, g)).reshape(-1, g)
    reached = source < lanes.size
    return wrapped(np.where(reached[..., None], flat[np.where(reached, source, 0)], PLAIN))
