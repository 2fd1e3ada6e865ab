"""A claim to be exact is judged by what was executed, not by the values of one machine alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from twinstep.parity.proof.corpus import corpus
from twinstep.parity.proof.corpus.judged import judged
from twinstep.parity.records.ledger import Status
from twinstep.parity.runner.recipes import Effort

QUICK = Effort(examples=4, shrink_seconds=0.0, repros=None)
CLAIMED = next(entry for entry in corpus() if entry.name == "fast_division_claimed_exact")


def test_exact_kernel_with_an_approximate_instruction_is_told_which_and_where() -> None:
    (cell,) = judged(CLAIMED, laws=("value",), effort=QUICK).cells.values()
    assert cell.status is Status.FAILED
    assert "runs div.full.f32 at " in cell.failure
    assert "triton_kernels.py:" in cell.failure
    # Replay rounds the instruction correctly: it was not the values that gave the claim away.
    assert "differs from the reference" not in cell.failure


def test_the_same_kernel_may_approximate_where_it_claims_a_bound() -> None:
    (cell,) = judged(replace(CLAIMED, arithmetic="bounded"), laws=("value",)).cells.values()
    assert cell.status is Status.PASSED


def test_no_repro_file_is_written_for_what_no_value_shows(tmp_path: Path) -> None:
    writing = replace(QUICK, repros=str(tmp_path))
    (cell,) = judged(CLAIMED, laws=("value",), effort=writing).cells.values()
    assert cell.status is Status.FAILED
    assert not cell.repro
    assert not list(tmp_path.iterdir())
