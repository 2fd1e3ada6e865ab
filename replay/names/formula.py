"""Expressions as formulas for people, and the first place where two of them differ."""

from __future__ import annotations

import numpy as np

from twinstep.replay.names.table import Row, Table

SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "lt": "<", "le": "<="}
LONG = 400


def text(table: Table, number: int, depth: int = 12) -> str:
    """A formula; operations of float32 rounded to nearest have bare signs, others a suffix."""
    row = table.rows[number]
    if row.op == "leaf":
        return table.leaves[row.args[0]]
    if row.op == "const":
        return _constant(row)
    if depth == 0:
        return "..."
    args = [text(table, n, depth - 1) for n in row.args]
    parts = row.op.split(".")
    modifiers = [p for p in parts[1:] if p not in ("rn", "f32")]
    if parts[0] in SIGNS and len(args) == 2:
        sign = SIGNS[parts[0]] + (f"[{'.'.join(modifiers)}]" if modifiers else "")
        return f"({args[0]} {sign} {args[1]})"
    if parts[0] == "join" and len(args) == 2 and table.constant_bits(row.args[0]) == 0:
        return f"float({args[1]})"
    return f"{row.op.replace('.rn', '').replace('.f32', '')}({', '.join(args)})"


def _constant(row: Row) -> str:
    """A constant: as a number where it is a usual one, else its bits."""
    bits = row.args[0]
    if row.granules == 0:
        return "true" if bits else "false"
    if row.granules in (2, 4):
        value = float(np.array(bits, f"u{2 * row.granules}").view(f"f{2 * row.granules}"))
        if bits == 0 or 1e-12 < abs(value) < 1e12:
            return f"{value:.9g}"
    return hex(bits)


def first_difference(table: Table, a: int, b: int) -> tuple[int, int]:
    """The smallest parts of two expressions that hold their only difference."""
    while True:
        one, two = table.rows[a], table.rows[b]
        alike = one.op == two.op and len(one.args) == len(two.args)
        if not alike or one.op in ("leaf", "const"):
            return a, b
        left, right = list(one.args), list(two.args)
        # Sorted operands may stand in another order.
        for number in one.args:
            if number in right and number in left:
                left.remove(number)
                right.remove(number)
        if len(left) != 1 or len(right) != 1:
            return a, b
        a, b = left[0], right[0]


def side_by_side(table: Table, a: int, b: int) -> str:
    """The first difference of two expressions, with the lines that made it."""
    a, b = first_difference(table, a, b)
    rows = []
    for who, number in (("kernel", a), ("reference", b)):
        formula = text(table, number, 4)
        shown = formula if len(formula) <= LONG else formula[:LONG] + " ..."
        site = table.rows[number].site.strip()
        rows.append(f"{who}: {shown}" + (f"   at {site}" if site else ""))
    return "\n".join(rows)
