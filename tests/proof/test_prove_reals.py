"""Equality over the real numbers: no pair of two functions is called one."""

from tests.helpers.named_fragments import named
from tests.helpers.real_pairs import OTHER, SAME
from twinstep.parity.prove.reals import PRIMES, equal


def test_pairs_that_are_one_function_are_proved() -> None:
    for pair in SAME:
        session, a, b, _ = named(pair)
        answer = equal(session.table, a, b, "f32")
        assert answer.equal, (pair, answer)
        assert answer.bits > 100


def test_no_pair_of_two_functions_is_called_one() -> None:
    for pair in OTHER:
        session, a, b, _ = named(pair)
        assert not equal(session.table, a, b, "f32").equal, pair


def test_moduli_are_primes_with_the_roots_that_are_used() -> None:
    small = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
    for p in PRIMES:
        assert p % 8 == 7
        # Miller and Rabin, whose exponent is odd here, to the first primes as bases.
        assert all(pow(base, (p - 1) // 2, p) == 1 for base in small)
        assert pow(37, (p - 1) // 2, p) in (1, p - 1)


def test_a_leaf_has_the_value_that_a_path_compares_it_with() -> None:
    session, a, b, _ = named(("mul.f32 %f0, %a, %b", "mov.f32 %f0, %b"))
    table = session.table
    x = table.rows[a].args[0]
    is_one = table.row("eq.f32", (x, table.const(0x3F80_0000, 2)), 0)
    assert equal(table, a, b, "f32").equal is False
    assert equal(table, a, b, "f32", [(is_one, True)]).equal
