"""Expressions evaluated on values of their leaves, by the functions of replay's instructions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array, raw
from twinstep.replay.errors import CannotReplay
from twinstep.replay.isa.floating import canonical
from twinstep.replay.isa.forms import resolve
from twinstep.replay.isa.operations import Operation
from twinstep.replay.names.table import Row, Table

COMPARISONS = frozenset(("eq", "lt", "le", "lo", "ls"))
LOGIC = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def needed(table: Table, numbers: Iterable[int]) -> list[int]:
    """These expressions and all that they are made of, parts first."""
    found: set[int] = set()
    stack = list(numbers)
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            row = table.rows[number]
            if row.op not in ("leaf", "const"):
                stack += row.args
    # A row is made after its parts.
    return sorted(found)


def leaves_of(table: Table, numbers: Iterable[int]) -> list[int]:
    """The leaves among what expressions are made of."""
    return [n for n in needed(table, numbers) if table.rows[n].op == "leaf"]


def evaluate(table: Table, numbers: Iterable[int], leaves: Mapping[int, Array]) -> dict[int, Array]:
    """Bits of expressions, bool for predicates.

    Args:
        table: that holds them.
        numbers: of the expressions.
        leaves: unsigned bits of each leaf, by its number, shape (1, n).

    Returns:
        Everything that was evaluated on the way, by number.
    """
    values: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for number in needed(table, numbers):
            row = table.rows[number]
            if row.op == "leaf":
                values[number] = leaves[number]
            else:
                values[number] = _row(row, [values[n] for n in row.args if row.op != "const"])
    return values


def _row(row: Row, args: list[Array]) -> Array:
    if row.op == "const":
        kind = np.bool_ if row.granules == 0 else np.dtype(f"u{2 * row.granules}")
        return np.array([[row.args[0]]], kind)
    if row.op == "if":
        return np.where(*args)
    if row.op == "join":
        parts = np.broadcast_arrays(*args)
        whole = np.ascontiguousarray(np.stack(parts, axis=-1))
        return np.asarray(whole.view(f"u{2 * len(args)}")[..., 0])
    if row.op == "part":
        halves = np.ascontiguousarray(args[0]).view(np.uint16)
        count = args[0].dtype.itemsize // 2
        return np.asarray(halves.reshape(*args[0].shape, count)[..., int(args[1].flat[0])])
    if row.granules == 0:
        if row.op == "not":
            return np.logical_not(args[0])
        if row.op in LOGIC:
            return reduce(LOGIC[row.op], args)
    return evaluate_row(row.op, args)


def evaluate_row(op: str, args: Sequence[Array]) -> Array:
    """Bits of an opcode's result, from bits of its operands."""
    operation = operation_of(op)
    sources = [_as(a, k) for a, k in zip(args, operation.sources, strict=True)]
    function = operation.first or operation.function
    result = np.asarray(function(*sources))
    if operation.results[0] == "pred":
        return result
    if operation.canonical:
        result = canonical(result)
    return result.view(NUMPY[raw(operation.results[0])])


def _as(bits: Array, kind: str) -> Array:
    return bits if kind == "pred" else bits.view(NUMPY[kind])


@lru_cache(4096)
def operation_of(op: str) -> Operation:
    """The operation of an expression's opcode.

    Raises:
        CannotReplay: it has none.
    """
    parts = op.split(".")
    found = resolve(f"setp.{op}" if parts[0] in COMPARISONS else op)
    if found is None:
        raise CannotReplay(f"{op} has no value of its own", op, "")
    return found
