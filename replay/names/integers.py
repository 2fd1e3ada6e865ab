"""Normal forms of integer arithmetic: constants, zero as an operand, and granules of results.

Shifts by whole granules, sign extension and selection move granules; the low 32 bits of a sum are
the sum of the low 32 bits.
"""

from __future__ import annotations

import numpy as np

from twinstep.replay.names.evaluate import evaluate_row
from twinstep.replay.names.table import Table

ARITHMETIC = ("add", "sub", "mul.lo", "shl", "rem", "div", "eq", "lt", "le", "lo", "ls")
BY_CASES = ("and", "or", "xor", "eq")
CASES = 4
"""Most predicates that are told apart."""
KINDS = frozenset(f"{sign}{width}" for sign in "bus" for width in (16, 32, 64))


def whole_number(
    table: Table, op: str, args: tuple[int, ...], granules: int, site: str
) -> int | None:
    """The number of an integer expression in normal form; None where it is one already."""
    name, _, kind = op.rpartition(".")
    if op == "shr.s32" and table.constant_bits(args[1]) == 16:
        return table.row("cvt.s32.s16", (table.granule(4 * args[0] + 1),), 2, site)
    if kind not in KINDS or name not in ARITHMETIC or len(args) != 2:
        return None
    bits = [table.constant_bits(number) for number in args]
    if None not in bits:
        # A divisor of 0 has no defined quotient.
        if name in ("rem", "div") and bits[1] == 0:
            return None
        known = [
            np.array([[b]], f"u{table.rows[n].granules * 2}")
            for b, n in zip(bits, args, strict=True)
        ]
        return table.const(int(evaluate_row(op, known).flat[0]), granules)
    if name in ("add", "sub", "shl") and bits[1] == 0:
        return args[0]
    if name == "add" and bits[0] == 0:
        return args[1]
    for at, number in enumerate(args):
        row = table.rows[number]
        if row.op == "if" and bits[1 - at] is not None:
            sides = [table.constant_bits(n) for n in row.args[1:]]
            if None not in sides:
                # Of constants alone, so that no expression grows.
                both = [table.row(op, _with(args, at, n), granules, site) for n in row.args[1:]]
                return table.row("if", (row.args[0], *both), granules, site)
    return None


def by_cases(table: Table, op: str, args: tuple[int, ...], granules: int, site: str) -> int | None:
    """The number of bits that few predicates choose among constants, case by case."""
    name, _, kind = op.rpartition(".")
    compared = name in ("eq", "lt", "le") and kind in ("f32", "f64")
    if not (name in BY_CASES and kind in KINDS or compared) or len(args) != 2:
        return None
    depths = [_depth(table, number) for number in args]
    if None in depths:
        return None
    if sum(d for d in depths if d is not None) > CASES:
        return None
    for at, number in enumerate(args):
        row = table.rows[number]
        if row.op == "if":
            both = [table.row(op, _with(args, at, n), granules, site) for n in row.args[1:]]
            return table.row("if", (row.args[0], *both), granules, site)
    known = [np.array([[table.rows[n].args[0]]], f"u{table.rows[n].granules * 2}") for n in args]
    return table.const(int(evaluate_row(op, known).flat[0]), granules)


def _depth(table: Table, number: int) -> int | None:
    """Predicates, one below the other, that choose a constant; None for anything else."""
    row = table.rows[number]
    if row.op != "if":
        return 0 if row.op == "const" else None
    inside = [_depth(table, n) for n in row.args[1:]]
    return None if None in inside else 1 + max(d for d in inside if d is not None)


def _with(args: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*args[:at], number, *args[at + 1 :])


def part_of(table: Table, number: int, part: int, site: str) -> int | None:
    """The number of a granule of an integer expression; None where it has no shorter form."""
    row = table.rows[number]
    if row.op == "if":
        pair = [table.granule(4 * n + part) for n in row.args[1:]]
        return table.row("if", (row.args[0], *pair), 1, site)
    name, _, kind = row.op.partition(".")
    if name == "cvt" and row.op != "cvt.s32.s16" and kind in ("s32.s16", "s64.s16", "s64.s32"):
        size = table.rows[row.args[0]].granules
        inside = part < size
        return table.granule(4 * row.args[0] + part) if inside else _sign(table, row.args[0])
    if row.op == "cvt.s32.s16" and part == 0:
        return row.args[0]
    if name in ("shl", "shr") and kind in KINDS:
        amount = table.constant_bits(row.args[1])
        if amount is None or amount % 16:
            return None
        at = part + amount // 16 * (1 if name == "shr" else -1)
        if 0 <= at < row.granules:
            return table.granule(4 * row.args[0] + at)
        signed = name == "shr" and kind[0] == "s"
        return _sign(table, row.args[0]) if signed else table.const(0, 1)
    if part == 0 and name in ("add", "sub") and kind in KINDS:
        low = [table.granule(4 * n) for n in row.args]
        if table.constant_bits(low[1]) == 0 or name == "add" and table.constant_bits(low[0]) == 0:
            return low[0] if table.constant_bits(low[1]) == 0 else low[1]
    if row.op in ("add.u64", "sub.u64") and part < 2:
        low = [table.joined((4 * n, 4 * n + 1)) for n in row.args]
        return table.granule(4 * table.row(f"{name}.u32", low, 2, site) + part)
    return None


def _sign(table: Table, number: int) -> int:
    """The granule of the sign of a value, all ones or all zeros."""
    top = table.granule(4 * number + table.rows[number].granules - 1)
    return table.granule(4 * table.row("cvt.s32.s16", (top,), 2) + 1)


def joined_of(table: Table, args: tuple[int, ...], site: str) -> int | None:
    """The number of a value of granules of one selection, or in order of one value."""
    rows = [table.rows[number] for number in args]
    if len(args) == 1:
        return args[0]
    if all(row.op == "if" and row.args[0] == rows[0].args[0] for row in rows):
        sides = [table.row("join", [row.args[i] for row in rows], len(args), site) for i in (1, 2)]
        return table.row("if", (rows[0].args[0], *sides), len(args), site)
    if rows[-1].op == "part":
        # Lower granules may have a shorter form than the value's own.
        whole = rows[-1].args[0]
        if table.rows[whole].granules == len(args):
            own = tuple(table.granule(4 * whole + i) for i in range(len(args)))
            return whole if own == args else None
    return None
