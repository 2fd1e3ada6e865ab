"""The page of conventions names tests that there are, and says something in every cell."""

from __future__ import annotations

import re

from tools.source import ROOT
from twinstep.parity.proof.upstream.edges import node_ids

PAGE = ROOT / "docs" / "guide" / "conventions.md"


def rows() -> list[list[str]]:
    """Cells of the table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_cell_says_something_and_every_row_has_a_test() -> None:
    tests = node_ids(ROOT)
    for row in rows():
        assert len(row) == 4, row
        assert all(row), row
        found = re.fullmatch(r"`(\S+)`", row[3])
        assert found is not None, row[3]
        assert found[1] in tests


def test_habits_are_named_once() -> None:
    names = [row[0] for row in rows()]
    assert len(names) == len(set(names)) >= 30
