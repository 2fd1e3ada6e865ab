"""Normal forms of integer arithmetic: constants, and zero as an operand."""

from __future__ import annotations

import numpy as np

from twinstep.replay.names.evaluate import evaluate_row
from twinstep.replay.names.table import Table

ARITHMETIC = ("add", "sub", "mul.lo", "shl", "rem", "div", "eq", "lt", "le", "lo", "ls")
KINDS = frozenset(f"{sign}{width}" for sign in "bus" for width in (16, 32, 64))


def whole_number(
    table: Table, op: str, args: tuple[int, ...], granules: int, site: str
) -> int | None:
    """The number of an integer expression in normal form; None where it is one already."""
    name, _, kind = op.rpartition(".")
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


def _with(args: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*args[:at], number, *args[at + 1 :])
