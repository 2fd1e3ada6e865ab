"""Each normal form against the expression as written: every 16-bit pattern, or many values."""

from collections.abc import Callable

import numpy as np
import pytest

from twinstep.parity.prove.search import drawn, is_nan
from twinstep.replay.dtypes import Array
from twinstep.replay.names.evaluate import evaluate
from twinstep.replay.names.normal import new_table
from twinstep.replay.names.table import Table

Rule = Callable[[Table, list[int]], int]


def unary(*ops: tuple[str, int]) -> Rule:
    """Operations one after the other, with the granules of their results."""

    def built(table: Table, leaves: list[int]) -> int:
        number = leaves[0]
        for op, granules in ops:
            number = table.row(op, (number,), granules)
        return number

    return built


def masked(op: str, bits: int, granules: int) -> Rule:
    return lambda table, leaves: table.row(op, (leaves[0], table.const(bits, granules)), granules)


def detour(word: str, narrow: str, wide: str, count: int = 2) -> Rule:
    """An operation in a wider format, rounded."""
    granules = {"f16": 1, "bf16": 1, "f32": 2, "f64": 4}

    def built(table: Table, leaves: list[int]) -> int:
        inside = tuple(
            table.row(f"cvt.{wide}.{narrow}", (leaf,), granules[wide]) for leaf in leaves[:count]
        )
        made = table.row(f"{word}.rn.{wide}", inside, granules[wide])
        return table.row(f"cvt.rn.{narrow}.{wide}", (made,), granules[narrow])

    return built


def zero_by_bits(table: Table, leaves: list[int]) -> int:
    bits = table.row("and.b32", (leaves[0], table.const(0x7FFF_FFFF, 2)), 2)
    return table.row("eq.b32", (bits, table.const(0, 2)), 0)


def exponent(table: Table, leaves: list[int]) -> int:
    ones = table.const(0x7F80_0000, 2)
    return table.row("eq.b32", (table.row("and.b32", (leaves[0], ones), 2), ones), 0)


def magnitude(table: Table, leaves: list[int]) -> int:
    bits = table.row("and.b32", (leaves[0], table.const(0x7FFF_FFFF, 2)), 2)
    return table.row("le.u32", (bits, table.const(0x7F7F_FFFF, 2)), 0)


def finite(table: Table, leaves: list[int]) -> int:
    size = table.row("abs.f32", (leaves[0],), 2)
    infinite = table.row("eq.f32", (size, table.const(0x7F80_0000, 2)), 0)
    number = table.row("eq.f32", (leaves[0], leaves[0]), 0)
    return table.row("and", (number, table.row("not", (infinite,), 0)), 0)


def nested(table: Table, leaves: list[int]) -> int:
    p, q = (table.row("lt.f32", (leaves[0], leaves[i]), 0) for i in (1, 2))
    inner = table.row("if", (q, leaves[1], leaves[2]), 2)
    return table.row("if", (table.row("not", (p,), 0), inner, leaves[2]), 2)


def nested_across(where: int) -> Rule:
    """A selection in a branch of another, whose other branch is that of the other one."""

    def built(table: Table, leaves: list[int]) -> int:
        p, q = (table.row("lt.f32", (leaves[0], leaves[i]), 0) for i in (1, 2))
        own = [leaves[1], leaves[1]]
        inner = [leaves[2], leaves[1]] if where else [leaves[1], leaves[2]]
        own[where] = table.row("if", (q, *inner), 2)
        return table.row("if", (p, *own), 2)

    return built


def beside_zero(word: str, place: int, zero: int = 0) -> Rule:
    """A float64 number rounded to float32, compared with 0."""

    def built(table: Table, leaves: list[int]) -> int:
        pair = [table.const(zero, 2), table.const(zero, 2)]
        pair[place] = table.row("cvt.rn.f32.f64", (leaves[0],), 2)
        return table.row(f"{word}.f32", pair, 0)

    return built


def flags(table: Table, leaves: list[int]) -> int:
    one, zero = table.const(1, 2), table.const(0, 2)
    p, q = (
        table.row("if", (table.row("lt.f32", (leaves[0], leaves[i]), 0), one, zero), 2)
        for i in (1, 2)
    )
    either = table.row("max.s32", (table.row("or.b32", (p, q), 2), zero), 2)
    return table.row("not", (table.row("eq.b32", (either, zero), 0),), 0)


def chosen_number(table: Table, leaves: list[int]) -> int:
    less = table.row("lt.f32", tuple(leaves[:2]), 0)
    either = table.row("if", (less, table.const(3, 2), table.const(7, 2)), 2)
    return table.row("sub.u32", (either, table.const(9, 2)), 2)


def low_word(op: str) -> Rule:
    """The low 32 bits of an operation on two numbers with more signs."""

    def built(table: Table, leaves: list[int]) -> int:
        wide = [table.row("cvt.s64.s32", (leaf,), 4) for leaf in leaves[:2]]
        return low(table, table.row(op, wide, 4))

    return built


def low(table: Table, number: int) -> int:
    parts = [table.row("part", (number, table.const(i, 1)), 1) for i in (0, 1)]
    return table.row("join", parts, 2)


def shifted(op: str, part: int) -> Rule:
    def built(table: Table, leaves: list[int]) -> int:
        number = table.row(op, (leaves[0], table.const(16, 2)), 2)
        return table.row("part", (number, table.const(part, 1)), 1)

    return built


def part_of_selection(table: Table, leaves: list[int]) -> int:
    less = table.row("lt.f32", tuple(leaves[:2]), 0)
    either = table.row("if", (less, leaves[1], leaves[2]), 2)
    return table.row("part", (either, table.const(1, 1)), 1)


def added_above(table: Table, leaves: list[int]) -> int:
    upper = table.row("shl.b32", (leaves[1], table.const(16, 2)), 2)
    return low(table, table.row("add.u32", (leaves[0], upper), 2))


def signed_half(table: Table, leaves: list[int]) -> int:
    half = table.row("part", (leaves[0], table.const(1, 1)), 1)
    return low(table, table.row("cvt.s64.s16", (half,), 4))


HALVES: dict[str, tuple[Rule, str]] = {
    "bf16 widened and rounded": (unary(("cvt.f32.bf16", 2), ("cvt.rn.bf16.f32", 1)), "bf16"),
    "f16 widened and rounded": (unary(("cvt.f32.f16", 2), ("cvt.rn.f16.f32", 1)), "f16"),
    "bf16 is the upper half": (unary(("cvt.f32.bf16", 2)), "f32"),
    "bf16 to f64": (unary(("cvt.f64.bf16", 4)), "f64"),
    "f16 to f64": (unary(("cvt.f64.f16", 4)), "f64"),
    "|f16|": (unary(("abs.f16", 1)), "f16"),
    "-f16": (unary(("neg.f16", 1)), "f16"),
    "|bf16|": (unary(("abs.bf16", 1)), "bf16"),
    "-bf16": (unary(("neg.bf16", 1)), "bf16"),
    "mask of all": (masked("and.b16", 0xFFFF, 1), ""),
    "mask of none": (masked("or.b16", 0, 1), ""),
}
MANY: dict[str, tuple[Rule, int, str]] = {
    **{
        f"{word} of f32 through f64": (detour(word, "f32", "f64"), 2, "f32")
        for word in ("add", "sub", "mul", "div")
    },
    "root of f32 through f64": (detour("sqrt", "f32", "f64", 1), 2, "f32"),
    **{
        f"{word} of f16 through f32": (detour(word, "f16", "f32"), 1, "f16")
        for word in ("add", "sub", "mul")
    },
    "add of bf16 through f32": (detour("add", "bf16", "f32"), 1, "bf16"),
    "sub of bf16 through f32": (detour("sub", "bf16", "f32"), 1, "bf16"),
    "|f32|": (unary(("abs.f32", 2)), 2, "f32"),
    "-f32": (unary(("neg.f32", 2)), 2, "f32"),
    "|f64| of f32": (unary(("cvt.f64.f32", 4), ("abs.f64", 4)), 2, "f64"),
    "-f64 of f32": (unary(("cvt.f64.f32", 4), ("neg.f64", 4)), 2, "f64"),
    "low word of a sum": (low_word("add.u64"), 2, ""),
    "low word of a difference": (low_word("sub.u64"), 2, ""),
    "upper half by a shift": (shifted("shr.s32", 0), 2, ""),
    "sign by a shift": (shifted("shr.s32", 1), 2, ""),
    "nothing by a shift": (shifted("shr.u32", 1), 2, ""),
    "lower half by a shift": (shifted("shl.b32", 1), 2, ""),
    "half of a selection": (part_of_selection, 2, ""),
    "half of a sum with nothing below": (added_above, 2, ""),
    "a half with its sign": (signed_half, 2, ""),
    "plus nothing": (masked("add.u32", 0, 2), 2, ""),
    "shifted by nothing": (masked("shl.b32", 0, 2), 2, ""),
    "an integer that is chosen": (chosen_number, 2, ""),
    "times one": (masked("mul.rn.f32", 0x3F80_0000, 2), 2, "f32"),
    "divided by one": (masked("div.rn.f32", 0x3F80_0000, 2), 2, "f32"),
    "an exponent of ones": (exponent, 2, ""),
    "bits below infinity": (magnitude, 2, ""),
    "a finite number": (finite, 2, ""),
    "zero by bits": (zero_by_bits, 2, ""),
    "nested selection": (nested, 2, "f32"),
    "selection across, in the first": (nested_across(0), 2, "f32"),
    "selection across, in the second": (nested_across(1), 2, "f32"),
    "integers as flags": (flags, 2, ""),
}


def both(rule: Rule, granules: int, values: list[Array]) -> tuple[Array, Array, bool]:
    """Results of an expression as written and in normal form, and whether they are two."""
    plain, normal = Table(lambda *_: None), new_table()
    found, rows = [], []
    for table in (plain, normal):
        leaves = [table.leaf(name, granules) for name in "xyz"]
        number = rule(table, leaves)
        rows.append(table.rows[number])
        found.append(evaluate(table, [number], dict(zip(leaves, values, strict=True)))[number])
    return found[0], found[1], rows[0] != rows[1] or len(plain.rows) != len(normal.rows)


def equal(a: Array, b: Array, kind: str) -> bool:
    return bool(((a == b) | (is_nan(a, kind) & is_nan(b, kind))).all())


@pytest.mark.parametrize("name", HALVES)
def test_rules_on_every_16_bit_pattern(name: str) -> None:
    rule, kind = HALVES[name]
    every = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1)
    written, normal, changed = both(rule, 1, [every, every, every])
    assert changed
    assert equal(written, normal, kind)


@pytest.mark.parametrize("name", MANY)
def test_rules_on_many_values(name: str) -> None:
    rule, granules, kind = MANY[name]
    table = new_table()
    leaves = [table.leaf(name, granules) for name in "xyz"]
    for seed in range(4):
        values = list(drawn(table, leaves, {}, seed, 1 << 14).values())
        written, normal, changed = both(rule, granules, values)
        assert changed
        assert equal(written, normal, kind)


@pytest.mark.parametrize("word", ["lt", "le"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("zero", [0, 0x8000_0000])
def test_a_rounded_number_beside_zero(word: str, place: int, zero: int) -> None:
    """Rounding is monotone: the neighbours of the two limits, and the special numbers, are all."""
    limit, infinite = 0x3690_0000_0000_0000, 0x7FF0_0000_0000_0000
    around = [bits + d for bits in (limit, infinite) for d in (-1, 0, 1)]
    around = [*around, 0, 1, 1 << 52, 0x36A0_0000_0000_0000, 0x3FF0_0000_0000_0000]
    bits = [b | sign for b in around if b >= 0 for sign in (0, 1 << 63)]
    every = np.array([bits], np.uint64)
    written, normal, changed = both(beside_zero(word, place, zero), 4, [every, every, every])
    assert changed
    assert equal(written, normal, "")


def test_a_product_of_sixteen_bits_is_no_name_of_the_fused_one() -> None:
    table = new_table()
    a, b, c = (table.leaf(name, 2) for name in "abc")
    product = table.row("mul.rn.f32", (a, b), 2)
    assert table.row("add.rn.f32", (product, c), 2) != table.row("fma.rn.f32", (a, b, c), 2)
    assert table.row("add.rn.f32", (c, product), 2) == table.row("add.rn.f32", (product, c), 2)
