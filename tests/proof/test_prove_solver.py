"""Bitwuzla behind the names: what it proves is so, and what it tells apart differs when run."""

import numpy as np
import pytest

from tests.helpers.name_pairs import DIFFERENT, EQUAL, NOT_PROVED
from tests.helpers.named_fragments import named
from twinstep.parity.prove import solver
from twinstep.parity.prove.search import is_nan
from twinstep.replay.dtypes import Array
from twinstep.replay.names.evaluate import evaluate
from twinstep.replay.names.normal import new_table

pytestmark = pytest.mark.skipif(not solver.installed(), reason=solver.MISSING)
SHARE = 8
"""One pair of so many is asked here."""


def test_pairs_that_names_do_not_cover_are_proved() -> None:
    for pair in EQUAL[-NOT_PROVED:]:
        session, a, b, kind = named(pair)
        assert solver.ask(session.table, a, b, kind).word == solver.EQUAL, pair


def test_pairs_with_different_bits_are_told_apart_by_values_that_do_so_on_replay() -> None:
    unanswered = 0
    for pair in DIFFERENT[3::SHARE]:
        session, a, b, kind = named(pair)
        answer = solver.ask(session.table, a, b, kind, seconds=1.0)
        assert answer.word != solver.EQUAL, pair
        unanswered += answer.word == solver.NO_ANSWER
        if answer.bits:
            leaves = {
                n: np.array([[bits]], f"u{2 * session.table.rows[n].granules}")
                for n, bits in answer.bits.items()
            }
            values = evaluate(session.table, [a, b], leaves)
            x, y = values[a], values[b]
            assert ((x != y) & ~(is_nan(x, kind) & is_nan(y, kind))).any(), pair
    assert unanswered <= 2


def test_conditions_of_a_path_are_assumed() -> None:
    table = new_table()
    x = table.leaf("x", 2)
    negative = table.row("lt.f32", (x, table.const(0, 2)), 0)
    size = table.row("if", (negative, table.row("neg.f32", (x,), 2), x), 2)
    absolute = table.row("abs.f32", (x,), 2)
    assert solver.ask(table, size, absolute, "f32").word == solver.DIFFERENT
    assert solver.ask(table, size, absolute, "f32", [(negative, True)]).word == solver.EQUAL


def test_the_bits_of_a_computed_nan_are_a_vector_of_their_own() -> None:
    table = new_table()
    x, y = (table.leaf(name, 2) for name in "xy")
    total = table.row("add.rn.f32", (x, y), 2)
    sign = table.row("shr.u32", (total, table.const(31, 2)), 2)
    nan = table.row("not", (table.row("eq.f32", (total, total), 0),), 0)
    # The canonical NaN has no sign, a leaf may have one.
    assert solver.ask(table, sign, table.const(0, 2), "", [(nan, True)]).word == solver.EQUAL
    own = table.row("shr.u32", (x, table.const(31, 2)), 2)
    odd = table.row("not", (table.row("eq.f32", (x, x), 0),), 0)
    assert solver.ask(table, own, table.const(0, 2), "", [(odd, True)]).word == solver.DIFFERENT


def test_an_operation_without_a_meaning_is_a_function_of_its_operands() -> None:
    table = new_table()
    x = table.leaf("x", 2)
    half = table.row("mul.rn.f32", (x, table.const(0x3F000000, 2)), 2)
    over = table.row("div.rn.f32", (x, table.const(0x40000000, 2)), 2)
    a, b = (table.row("ex2.approx.f32", (n,), 2) for n in (half, over))
    other = table.row("lg2.approx.f32", (half,), 2)
    assert solver.ask(table, a, b, "f32").word == solver.EQUAL
    assert solver.ask(table, a, other, "f32").word != solver.EQUAL


# --- the theorem that ÷ and √ through a wider format rest on, in float16 through float32 ---------


def rounded(top: Array, bottom: Array, exponent: Array) -> Array:
    """Top / bottom * 2**exponent rounded once to float16, ties to even, in integers."""
    scale = np.floor(np.log2(top / bottom)).astype(np.int64)
    for shift in (-1, 1):
        low = np.where(scale >= 0, top >= bottom << np.maximum(scale, 0), True)
        low &= np.where(scale < 0, top << np.maximum(-scale, 0) >= bottom, True)
        scale = np.where(low, scale, scale + shift) if shift < 0 else scale
    unit = np.maximum(scale + exponent - 10, -24)
    left = exponent - unit
    numerator = top << np.maximum(left, 0)
    divisor = bottom << np.maximum(-left, 0)
    whole, rest = numerator // divisor, numerator % divisor
    whole += (2 * rest > divisor) | ((2 * rest == divisor) & (whole % 2 == 1))
    return np.asarray(np.ldexp(whole.astype(np.float64), unit.astype(np.int32)))


def test_a_quotient_of_float16_through_float32_is_rounded_once() -> None:
    top, bottom = np.meshgrid(np.arange(1024, 2048), np.arange(1024, 2048))
    for exponent in (0, -14, -23):
        a, b = np.ldexp(top, exponent).astype(np.float32), bottom.astype(np.float32)
        found = (a / b).astype(np.float16).astype(np.float64)
        assert np.array_equal(found, rounded(top, bottom, np.full_like(top, exponent)))


def test_a_root_of_float16_through_float32_is_rounded_once() -> None:
    every = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)
    found = np.sqrt(every.astype(np.float32)).astype(np.float16)
    above, below = (
        (found.view(np.uint16) + np.uint16(d % 65536)).view(np.float16).astype(np.float64)
        for d in (1, -1)
    )
    exact, own = every.astype(np.float64), found.astype(np.float64)
    # A middle of two numbers of float16 has a square that float64 holds.
    assert (((own + above) / 2) ** 2 > exact).all()
    assert (((own + below) / 2) ** 2 < exact).all()
