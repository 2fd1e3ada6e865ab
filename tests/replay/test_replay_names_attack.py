"""The prover attacked: pairs of fragments with known different bits, and with known equal ones."""

import numpy as np
import pytest

from tests.helpers.name_pairs import DIFFERENT, EQUAL, NOT_PROVED, WITNESSES
from tests.helpers.named_fragments import named
from twinstep.parity.prove.search import telling
from twinstep.replay.names.evaluate import evaluate, leaves_of
from twinstep.replay.names.session import Session


def differ(session: Session, a: int, b: int, kind: str, fragment: str) -> bool:
    """True if the expressions differ for operands that are known, or drawn."""
    if fragment not in WITNESSES:
        return telling(session.table, a, b, kind, (), {}, rounds=12) is not None
    known = WITNESSES[fragment]
    leaves = {}
    for leaf in leaves_of(session.table, [a, b]):
        row = session.table.rows[leaf]
        bits = known[session.table.leaves[row.args[0]]]
        leaves[leaf] = np.array([[bits]], f"u{2 * row.granules}")
    values = evaluate(session.table, [a, b], leaves)
    return bool((values[a] != values[b]).any())


def test_there_are_enough_pairs() -> None:
    assert len(set(DIFFERENT)) >= 100
    assert len(set(EQUAL)) >= 50


@pytest.mark.parametrize("chunk", range(4))
def test_no_pair_with_different_bits_has_one_name(chunk: int) -> None:
    for pair in DIFFERENT[chunk::4]:
        session, a, b, kind = named(pair)
        assert a != b, pair
        assert differ(session, a, b, kind, pair[1]), pair


def test_pairs_with_equal_bits_that_are_not_proved_are_counted() -> None:
    unproved = []
    for pair in EQUAL:
        session, a, b, kind = named(pair)
        if a != b:
            unproved.append(pair)
            assert telling(session.table, a, b, kind, (), {}) is None, pair
    assert unproved == EQUAL[-NOT_PROVED:]
