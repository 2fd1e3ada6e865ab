"""Normal forms: the few equations that are taken for granted, and nothing else.

Operands of + and x are sorted; of a fused product its two factors. Nothing is associated, nothing
is contracted, no operand of a minimum is moved. Every equation holds for all bits, a NaN counted as
one value; the tests enumerate those about 16-bit patterns.

Through a wider format: for + - x / and the square root of numbers of float32, the float64 result
rounded to float32 is the float32 result (Figueroa 1995: 53 >= 2 * 24 + 2). In the subnormal range
the theorem needs a word: an exact sum or product is a number of float64, and an exact quotient or
root that is none in the middle of two numbers of float32 keeps 2^-49 of its size from it, which is
more than float64 moves it. For 16 bits through float32 it is used for sums, and for products of
float16: a product of bfloat16 may be subnormal in float32. It does not hold for a fused product.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from twinstep.replay.names.evaluate import evaluate_row
from twinstep.replay.names.flags import below_infinity, flag, logic
from twinstep.replay.names.integers import by_cases, joined_of, part_of, whole_number
from twinstep.replay.names.sums import mix, united
from twinstep.replay.names.table import Table

FLOAT_GRANULES = {"f16": 1, "bf16": 1, "f32": 2, "f64": 4}
INTEGER_TYPES = {"u": "b", "s": "b", "b": "b"}
SIGN = {1: 0x8000, 2: 0x8000_0000, 4: 0x8000_0000_0000_0000}
ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F80_0000, "f64": 0x3FF0_0000_0000_0000}
HALF_OF_LEAST = 0x3690_0000_0000_0000
"""Bits of 2^-150 in float64."""
THROUGH_FLOAT64 = ("add", "sub", "mul", "div", "sqrt")
THROUGH_FLOAT32 = {
    "cvt.rn.f16.f32": ("add", "sub", "mul"),
    "cvt.rn.bf16.f32": ("add", "sub"),
}
"""A product of bf16 may be subnormal in float32, and rounded twice."""
BITWISE = ("and", "or", "xor")


def canonical_opcode(opcode: str) -> str:
    """An opcode with its rounding written out, so that equal meanings have equal names."""
    parts = opcode.split(".")
    kind = parts[-1].removesuffix("x2")
    if parts[0] in ("add", "sub", "mul") and kind in FLOAT_GRANULES:
        rounded = {"rn", "rz", "rm", "rp"} & set(parts)
        parts = [parts[0], *(() if rounded else ("rn",)), *parts[1:]]
    if parts[0] == "mad" and kind in FLOAT_GRANULES:
        parts[0] = "fma"
    if parts[0] in (*BITWISE, "not", "shl") and kind[:1] in INTEGER_TYPES:
        parts[-1] = "b" + kind[1:]
    if parts[0] in ("add", "sub") and kind[:1] == "s" and "sat" not in parts:
        parts[-1] = "u" + kind[1:]
    if parts[:2] == ["mul", "lo"] or parts[:2] == ["mad", "lo"]:
        parts[-1] = "u" + kind[1:] if "sat" not in parts else parts[-1]
    return ".".join(parts)


@cache
def _sorts(op: str) -> int:
    """How many leading operands may change places."""
    parts = op.split(".")
    if parts[0] in ("add", "mul", *BITWISE):
        return 2
    if parts[0] == "fma" or parts[:2] == ["mad", "lo"]:
        return 2
    return 2 if parts[0] == "eq" else 0


@cache
def _floating(op: str) -> bool:
    """True for arithmetic of floats, which no equation about bits or predicates is about."""
    name, kind = op.partition(".")[0], op.rpartition(".")[2]
    return name in ("add", "sub", "mul", "div", "fma", "sqrt") and kind in FLOAT_GRANULES


def simplified(
    table: Table, op: str, args: tuple[int, ...], granules: int, site: str
) -> int | None:
    """The number of an expression in normal form; None where it is one already."""
    if op in ("leaf", "const", "mix"):
        return None
    if op == "bag":
        return united(table, args)
    rows = table.rows
    for number in args:
        if rows[number].op == "mix":
            return mix(table, args, granules)
    if _floating(op):
        if _sorts(op) and args[0] > args[1]:
            return table.row(op, (args[1], args[0], *args[2:]), granules, site)
        return _by_one(table, op, args) if op.startswith(("mul.rn.", "div.rn.")) else None
    if op == "part":
        return part_of(table, args[0], table.rows[args[1]].args[0], site)
    if op == "join":
        return _joined(table, args, site)
    found = flag(table, op, args, granules, site)
    if found is not None:
        return found
    found = by_cases(table, op, args, granules, site)
    if found is not None:
        return found
    if granules == 0 or op == "if":
        found = logic(table, op, args, granules, site)
        if found is not None:
            return found
    if granules == 0:
        found = _compared(table, op, args, site)
        if found is not None:
            return found
    found = whole_number(table, op, args, granules, site)
    if found is not None:
        return found
    if _sorts(op) and args[0] > args[1]:
        return table.row(op, (args[1], args[0], *args[2:]), granules, site)
    if op.startswith(("and.b", "or.b", "xor.b")):
        return _bitwise(table, op, args, granules, site)
    if op.startswith(("abs.", "neg.")):
        return _sign(table, op, args, granules, site)
    return _converted(table, op, args, site) if op.startswith("cvt.") else None


def _by_one(table: Table, op: str, args: tuple[int, ...]) -> int | None:
    """A product or quotient with 1 is the other operand, without `.ftz`."""
    name, _, kind = op.split(".", 2)
    if kind not in ONE:
        return None
    if table.constant_bits(args[1]) == ONE[kind]:
        return args[0]
    return args[1] if name == "mul" and table.constant_bits(args[0]) == ONE[kind] else None


def _joined(table: Table, args: tuple[int, ...], site: str) -> int | None:
    """Granules of one value in order are that value; constants are one constant."""
    rows = [table.rows[number] for number in args]
    if all(row.op == "const" for row in rows):
        bits = sum(row.args[0] << 16 * i for i, row in enumerate(rows))
        return table.const(bits, len(args))
    if all(row.op == "part" for row in rows):
        whole = {row.args[0] for row in rows}
        order = [table.constant_bits(row.args[1]) for row in rows]
        if len(whole) == 1 and order == list(range(len(rows))):
            number = whole.pop()
            if table.rows[number].granules == len(rows):
                return number
    return joined_of(table, args, site)


def _compared(table: Table, op: str, args: tuple[int, ...], site: str) -> int | None:
    """Comparisons of widened numbers are those of the narrow ones; bits without a sign with 0."""
    found = below_infinity(table, op, args, site)
    if found is not None:
        return found
    name, _, kind = op.partition(".")
    if name not in ("eq", "lt", "le"):
        return None
    known = [table.constant_bits(number) for number in args]
    if None not in known:
        sizes = [2 * table.rows[number].granules for number in args]
        bits = [np.array([[b]], f"u{size}") for b, size in zip(known, sizes, strict=True)]
        return table.const(int(evaluate_row(op, bits).flat[0]), 0)
    rounded = _rounded_beside_zero(table, name, args, site) if kind == "f32" else None
    if rounded is not None:
        return rounded
    if kind == "f64":
        narrow = [_single(table, number) for number in args]
        if None not in narrow and any(table.rows[n].op == "cvt.f64.f32" for n in args):
            singles = tuple(n for n in narrow if n is not None)
            return table.row(f"{name}.f32", singles, 0, site)
    if op in ("eq.b32", "eq.u32", "eq.s32") and 0 in [table.constant_bits(n) for n in args]:
        other = args[1] if table.constant_bits(args[0]) == 0 else args[0]
        row = table.rows[other]
        if row.op == "and.b32" and SIGN[2] - 1 in [table.constant_bits(n) for n in row.args]:
            number = next(n for n in row.args if table.constant_bits(n) != SIGN[2] - 1)
            return table.row("eq.f32", (number, table.const(0, 2)), 0, site)
    return None


def _rounded_beside_zero(table: Table, name: str, args: tuple[int, ...], site: str) -> int | None:
    """A float64 number rounded to float32 beside 0 is that number beside where rounding gives 0.

    Rounding is monotone, and 2^-150, half of the least float32 number, is a tie that goes to 0.
    """
    inside = [_rounded_from(table, number) for number in args]
    at = 0 if inside[0] is not None else 1
    known, bits = inside[at], table.constant_bits(args[1 - at])
    if name not in ("lt", "le") or known is None or bits is None or bits & SIGN[2] - 1:
        return None
    above = (name == "lt") == (at == 1)
    limit = table.const(HALF_OF_LEAST | (0 if above else SIGN[4]), 4)
    return table.row(f"{name}.f64", (known, limit) if at == 0 else (limit, known), 0, site)


def _rounded_from(table: Table, number: int) -> int | None:
    row = table.rows[number]
    return row.args[0] if row.op == "cvt.rn.f32.f64" else None


def _single(table: Table, number: int) -> int | None:
    """The float32 value that a float64 value equals; None if there is none."""
    bits = table.constant_bits(number)
    if bits is None:
        return _narrowed(table, number)
    wide = np.array(bits, np.uint64).view(np.float64)
    with np.errstate(all="ignore"):
        single = wide.astype(np.float32)
    exact = bool(single.astype(np.float64) == wide)
    return table.const(int(single.view(np.uint32)), 2) if exact else None


def _bitwise(table: Table, op: str, args: tuple[int, ...], granules: int, site: str) -> int | None:
    """Granule by granule where an operand is made of granules; masks of all or nothing vanish."""
    name = op.split(".")[0]
    parts = [[table.granule(4 * n + i) for i in range(granules)] for n in args]
    if granules > 1 and any(table.rows[n].op == "join" for n in args):
        pairs = zip(*parts, strict=True)
        found = [table.row(f"{name}.b16", pair, 1, site) for pair in pairs]
        return table.joined([4 * n for n in found])
    full = (1 << 16 * granules) - 1
    for own, other in (args, args[::-1]):
        bits = table.constant_bits(own)
        if bits is None:
            continue
        if bits == 0:
            return own if name == "and" else other
        if bits == full and name != "xor":
            return other if name == "and" else own
        whole = [(bits >> 16 * i & 0xFFFF) in (0, 0xFFFF) for i in range(granules)]
        if granules > 1 and all(whole) and name != "xor":
            split = [table.granule(4 * other + i) for i in range(granules)]
            masks = [table.const(bits >> 16 * i & 0xFFFF, 1) for i in range(granules)]
            pieces = zip(split, masks, strict=True)
            found = [table.row(f"{name}.b16", piece, 1, site) for piece in pieces]
            return table.joined([4 * n for n in found])
        row = table.rows[other]
        if row.op == op:
            inner = [(table.constant_bits(n), n) for n in row.args]
            known = [b for b, _ in inner if b is not None]
            rest = [n for b, n in inner if b is None]
            if known and rest:
                both = {"and": bits & known[0], "or": bits | known[0], "xor": bits ^ known[0]}[name]
                return table.row(op, (rest[0], table.const(both, granules)), granules, site)
    if args[0] == args[1]:
        return table.const(0, granules) if name == "xor" else args[0]
    return None


def _sign(table: Table, op: str, args: tuple[int, ...], granules: int, site: str) -> int | None:
    """Absolute value clears the sign bit, negation changes it."""
    name, *middle, kind = op.split(".")
    if kind not in FLOAT_GRANULES or middle:
        return None
    if kind == "f64" and table.rows[args[0]].op == "cvt.f64.f32":
        narrow = table.row(f"{name}.f32", table.rows[args[0]].args, 2, site)
        return table.row("cvt.f64.f32", (narrow,), 4, site)
    mask = SIGN[granules] - 1 if name == "abs" else SIGN[granules]
    new = f"{'and' if name == 'abs' else 'xor'}.b{16 * granules}"
    return table.row(new, (args[0], table.const(mask, granules)), granules, site)


def _converted(table: Table, op: str, args: tuple[int, ...], site: str) -> int | None:
    """Conversions: exact ones undone, exact ones in two steps, float64 on the way to float32."""
    parts = op.split(".")
    target, source = parts[-2:]
    row = table.rows[args[0]]
    if op == "cvt.f32.bf16":
        return table.row("join", (table.const(0, 1), args[0]), 2, site)
    if op in ("cvt.f64.bf16", "cvt.f64.f16"):
        single = table.row(f"cvt.f32.{source}", args, 2, site)
        return table.row("cvt.f64.f32", (single,), 4, site)
    if op == "cvt.rn.bf16.f32" and row.op == "join" and table.constant_bits(row.args[0]) == 0:
        return row.args[1]
    if op == "cvt.rn.f16.f32" and row.op == "cvt.f32.f16":
        return row.args[0]
    if op in THROUGH_FLOAT32:
        for name in THROUGH_FLOAT32[op]:
            if row.op == f"{name}.rn.f32":
                narrow = [_halved(table, number, target) for number in row.args]
                if None not in narrow:
                    known = tuple(n for n in narrow if n is not None)
                    return table.row(f"{name}.rn.{target}", known, 1, site)
    if op == "cvt.f32.f16" and row.op == "and.b16":
        masks = [n for n in row.args if table.constant_bits(n) == SIGN[1] - 1]
        if masks:
            inside = next(n for n in row.args if n not in masks)
            wide = table.row(op, (inside,), 2, site)
            return table.row("and.b32", (wide, table.const(SIGN[2] - 1, 2)), 2, site)
    if row.op == "const":
        return _folded(table, op, row.args[0], source)
    if row.op == "if" and "const" in [table.rows[n].op for n in row.args[1:]]:
        granules = FLOAT_GRANULES.get(target)
        if granules is not None:
            both = tuple(table.row(op, (n,), granules, site) for n in row.args[1:])
            return table.row("if", (row.args[0], *both), granules, site)
    if op == "cvt.rn.f32.f64":
        if row.op == "cvt.f64.f32":
            return row.args[0]
        word = row.op.split(".")[0]
        if word in THROUGH_FLOAT64 and row.op == f"{word}.rn.f64":
            narrow = [_narrowed(table, number) for number in row.args]
            if None not in narrow:
                known = tuple(n for n in narrow if n is not None)
                return table.row(f"{word}.rn.f32", known, 2, site)
    return None


def _folded(table: Table, op: str, bits: int, source: str) -> int | None:
    """A conversion of a constant."""
    result = evaluate_row(op, [np.array([[bits]], f"u{2 * FLOAT_GRANULES.get(source, 2)}")])
    return table.const(int(result.flat[0]), max(result.dtype.itemsize // 2, 1))


def _halved(table: Table, number: int, kind: str) -> int | None:
    """The 16-bit value that a float32 value was widened from; None if there is none."""
    row = table.rows[number]
    if kind == "f16":
        return row.args[0] if row.op == "cvt.f32.f16" else None
    made = row.op == "join" and table.constant_bits(row.args[0]) == 0
    return row.args[1] if made else None


def _narrowed(table: Table, number: int) -> int | None:
    """The float32 value that a float64 value was widened from; None if there is none."""
    row = table.rows[number]
    return row.args[0] if row.op == "cvt.f64.f32" else None


def new_table() -> Table:
    """An empty table with these normal forms."""
    return Table(simplified)
