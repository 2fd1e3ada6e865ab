"""Normal forms of predicates, of selection, and of integers that are a predicate as 0 or 1.

Predicates obey the laws of propositional logic: `and` and `or` are sets of operands. An integer
that is 1 or 0 by a predicate keeps it through `or`, `and`, maxima and comparisons with a constant.
"""

from __future__ import annotations

from twinstep.replay.names.table import Table

INFINITY = 0x7F80_0000


def logic(table: Table, op: str, args: tuple[int, ...], granules: int, site: str) -> int | None:
    """The number of a predicate or a selection in normal form; None where it is one already."""
    if op == "if":
        return _selection(table, args, granules, site)
    bits = [table.constant_bits(number) for number in args]
    if op == "not":
        if bits[0] is not None:
            return table.const(1 - bits[0], 0)
        row = table.rows[args[0]]
        return row.args[0] if row.op == "not" else None
    if op in ("and", "or"):
        return _set(table, op, args, site)
    if op == "xor" and bits[0] is not None and bits[1] is not None:
        return table.const(bits[0] ^ bits[1], 0)
    return None


def _set(table: Table, op: str, args: tuple[int, ...], site: str) -> int | None:
    """`and` or `or` of any number of predicates: sorted, each once, constants gone."""
    absorbing = 0 if op == "and" else 1
    members: set[int] = set()
    for number in args:
        row = table.rows[number]
        members.update(row.args if row.op == op and row.granules == 0 else (number,))
    known = {number for number in members if table.rows[number].op == "const"}
    if any(table.constant_bits(number) == absorbing for number in known):
        return table.const(absorbing, 0)
    rest = tuple(sorted(members - known))
    if not rest:
        return table.const(1 - absorbing, 0)
    if op == "and":
        finite = _finite(table, rest, site)
        if finite is not None:
            return table.row("and", finite, 0, site)
    negated = {table.rows[n].args[0] for n in rest if table.rows[n].op == "not"}
    if negated.intersection(rest):
        return table.const(absorbing, 0)
    if len(rest) == 1:
        return rest[0]
    return None if rest == args else table.row(op, rest, 0, site)


def _selection(table: Table, args: tuple[int, ...], granules: int, site: str) -> int | None:
    """`if`: of one predicate that is not negated, with nested ones merged."""
    decided = table.constant_bits(args[0])
    if decided is not None:
        return args[1] if decided else args[2]
    if args[1] == args[2]:
        return args[1]
    row, then, other = (table.rows[number] for number in args)
    if row.op == "not":
        return table.row("if", (row.args[0], args[2], args[1]), granules, site)
    if then.op == "if" and then.args[2] == args[2]:
        both = table.row("and", (args[0], then.args[0]), 0, site)
        return table.row("if", (both, then.args[1], args[2]), granules, site)
    if other.op == "if" and other.args[1] == args[1]:
        either = table.row("or", (args[0], other.args[0]), 0, site)
        return table.row("if", (either, args[1], other.args[2]), granules, site)
    if then.op == "if" and then.args[1] == args[2]:
        no = table.row("not", (then.args[0],), 0, site)
        both = table.row("and", (args[0], no), 0, site)
        return table.row("if", (both, then.args[2], args[2]), granules, site)
    if other.op == "if" and other.args[2] == args[1]:
        no = table.row("not", (args[0],), 0, site)
        both = table.row("and", (no, other.args[0]), 0, site)
        return table.row("if", (both, other.args[1], args[1]), granules, site)
    if granules == 0:
        yes = table.row("and", (args[0], args[1]), 0, site)
        no = table.row("and", (table.row("not", (args[0],), 0, site), args[2]), 0, site)
        return table.row("or", (yes, no), 0, site)
    return None


def predicate_of(table: Table, number: int) -> int | None:
    """The predicate that an integer is 1 or 0 by; None if it is another integer."""
    row = table.rows[number]
    if row.op == "const":
        return table.const(row.args[0], 0) if row.args[0] in (0, 1) else None
    if row.op == "if" and [table.constant_bits(n) for n in row.args[1:]] == [1, 0]:
        return row.args[0]
    if row.op == "if" and [table.constant_bits(n) for n in row.args[1:]] == [0, 1]:
        return table.row("not", (row.args[0],), 0)
    return None


def flag(table: Table, op: str, args: tuple[int, ...], granules: int, site: str) -> int | None:
    """The number of an operation on integers that are 1 or 0; None for any other."""
    name, _, kind = op.partition(".")
    if kind[:1] not in ("b", "u", "s") or kind[1:] not in ("16", "32", "64") or len(args) != 2:
        return None
    if name in ("max", "min", "or", "and"):
        inside = [predicate_of(table, number) for number in args]
        if None in inside:
            return None
        word = "or" if name in ("max", "or") else "and"
        made = table.row(word, tuple(n for n in inside if n is not None), 0, site)
        one, zero = table.const(1, granules), table.const(0, granules)
        return table.row("if", (made, one, zero), granules, site)
    if name == "eq" and granules == 0:
        for own, other in (args, args[::-1]):
            bits = table.constant_bits(own)
            found = predicate_of(table, other)
            if bits in (0, 1) and found is not None:
                return found if bits else table.row("not", (found,), 0, site)
    return None


def _finite(table: Table, members: tuple[int, ...], site: str) -> tuple[int, ...] | None:
    """X = x and |x| not infinite, as |x| < infinity; None where no two members are that."""
    equal = {table.rows[n].args[0]: n for n in members if _equals_itself(table, n)}
    for number in members if equal else ():
        inner = table.rows[table.rows[number].args[0]] if table.rows[number].op == "not" else None
        if inner is None or inner.op != "eq.f32":
            continue
        for own, other in (inner.args, inner.args[::-1]):
            if table.constant_bits(own) == INFINITY:
                for x, same in equal.items():
                    if table.row("abs.f32", (x,), 2) == other:
                        below = table.row("lt.f32", (other, own), 0, site)
                        return (below, *(n for n in members if n not in (number, same)))
    return None


def _equals_itself(table: Table, number: int) -> bool:
    row = table.rows[number]
    return row.op == "eq.f32" and row.args[0] == row.args[1]


def below_infinity(table: Table, op: str, args: tuple[int, ...], site: str) -> int | None:
    """Comparisons of bits without a sign with those of infinity, as |x| < infinity."""
    name, _, kind = op.partition(".")
    if op in ("eq.b32", "eq.u32", "eq.s32"):
        # An exponent of ones only.
        for own, other in (args, args[::-1]):
            row = table.rows[other]
            if table.constant_bits(own) == INFINITY and row.op == "and.b32":
                rest = [n for n in row.args if table.constant_bits(n) != INFINITY]
                if len(rest) == 1:
                    pair = (table.row("abs.f32", (rest[0],), 2), table.const(INFINITY, 2))
                    return table.row("not", (table.row("lt.f32", pair, 0, site),), 0, site)
        return None
    if name not in ("lt", "lo", "le", "ls") or kind not in ("s32", "u32"):
        return None
    left, right = (table.constant_bits(n) for n in args)
    if name in ("le", "ls"):
        # x <= c is x < c + 1, and c <= x is c - 1 < x.
        left = left and left - 1
        right = right and right + 1
    if right == INFINITY and _unsigned(table, args[0]):
        return table.row("lt.f32", (args[0], table.const(INFINITY, 2)), 0, site)
    if left == INFINITY - 1 and _unsigned(table, args[1]):
        below = table.row("lt.f32", (args[1], table.const(INFINITY, 2)), 0, site)
        return table.row("not", (below,), 0, site)
    return None


def _unsigned(table: Table, number: int) -> bool:
    """True if the sign bit of 32 bits is known to be clear."""
    row = table.rows[number]
    if row.op == "join":
        row = table.rows[row.args[-1]]
    masks = [table.constant_bits(n) for n in row.args] if row.op.startswith("and.b") else []
    return any(bits is not None and not bits >> (16 * row.granules - 1) for bits in masks)
