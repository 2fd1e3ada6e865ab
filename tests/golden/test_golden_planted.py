"""One line changed: `parity golden verify` names trace, step and field."""

from __future__ import annotations

from pathlib import Path

from twinstep.parity.proof.golden.planted import PLANTED, ROOT, verified_with


def test_a_changed_line_is_named(tmp_path: Path) -> None:
    """One of them; `parity golden planted` has all."""
    row = next(row for row in PLANTED if row.name == "scale updated before unscale")
    outcome = verified_with(row, tmp_path)
    assert outcome.code == 1, outcome.said
    assert outcome.first.startswith("deepspeed_flat_growth, step 2 (g), norm: 2.5 was replayed")
    assert "deepspeed_flat_growth, step 2 (g), weights[0]" in outcome.said


def test_there_are_twenty_and_every_line_is_there_once() -> None:
    assert len({(row.side, row.name) for row in PLANTED}) == len(PLANTED) >= 20
    assert all((ROOT / row.file).read_text().count(row.before) == 1 for row in PLANTED)
    assert sum(row.side == "fast" for row in PLANTED) >= 20
