"""Every law has a wrong kernel that it rejects and no other law of the operation does."""

from __future__ import annotations

import pytest

from twinstep.parity.laws import LAWS
from twinstep.parity.proof.corpus import Entry
from twinstep.parity.proof.corpus.judged import judged
from twinstep.parity.proof.corpus.wrong_by_law import SHELF
from twinstep.parity.records.ledger import Status
from twinstep.parity.runner.recipes import Effort

EFFORT = Effort(shrink_seconds=0.0, repros=None)
# The first needs a GPU; kernels for the others run on replay: they stand elsewhere.
ELSEWHERE = {"graph_capture", "large_index", "formula", "race_free"}


@pytest.mark.parametrize("entry", SHELF, ids=lambda entry: entry.name)
def test_wrong_kernel_is_rejected_by_its_law_alone(entry: Entry) -> None:
    ledger = judged(entry, effort=EFFORT)
    broken = {cell.key.law for cell in ledger.with_status(Status.FAILED)}
    assert broken == {entry.law}


def test_every_law_has_such_a_kernel() -> None:
    assert {entry.law for entry in SHELF} == set(LAWS) - ELSEWHERE
    alone = [entry.law for entry in SHELF if entry.alone]
    assert len(alone) == len(set(alone))
