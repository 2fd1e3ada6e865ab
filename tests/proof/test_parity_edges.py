"""The edge table: complete, proved, current; and the check can say no."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinstep.parity.proof.upstream.edges import (
    PAGE,
    ROOT,
    ROWS,
    Edge,
    built,
    edge_ids,
    faults,
    main,
    node_ids,
    page,
)

TESTS = node_ids(ROOT)
COMPONENTS = built(ROOT)


def test_every_edge_is_decided_and_proved_or_waits() -> None:
    assert faults(ROWS, TESTS, COMPONENTS) == []


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(ROWS)


def test_every_edge_of_these_components_is_counted() -> None:
    ids = edge_ids()
    assert len(ids) == len(set(ids)) == 159
    assert (ids[0], ids[-1]) == ("LS-1", "EN-6")


def changed(**changes: str) -> tuple[Edge, ...]:
    """The table with its first row, a proved one, changed."""
    return (replace(ROWS[0], **changes), *ROWS[1:])


BAD: dict[str, tuple[tuple[Edge, ...], str]] = {
    "missing": (ROWS[1:], "LS-1 has no row"),
    "twice": ((*ROWS, ROWS[0]), "LS-1 has 2 rows"),
    "unknown": ((*ROWS, replace(ROWS[0], id="LS-17")), "LS-17 has a row, but is no known edge"),
    "decision": (changed(decision="maybe"), "LS-1 has decision 'maybe'"),
    "field": (changed(decision="compat:speed"), "LS-1 selects speed, which is no field of Compat"),
    "reason": (changed(reason=""), "LS-1 gives no reason"),
    "test": (changed(test="tests/test_x.py::test_y"), "which does not exist"),
    "neither": (changed(test=""), "LS-1 should name either a test or the component"),
    "both": (changed(waits_for="zero_helpers"), "LS-1 should name either a test or"),
    "built": (changed(test="", waits_for="FusedAdam"), "LS-1 waits for FusedAdam, which exists"),
    "out": (changed(decision="out"), "LS-1 is out, but names a test or a component"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_faulty_table_is_refused(case: str) -> None:
    rows, message = BAD[case]
    said = faults(rows, TESTS, COMPONENTS)
    assert len(said) == 1
    assert message in said[0]


def test_node_ids_are_read_from_source(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    source = "def test_a():\n    def test_inner(): ...\ndef helper(): ...\n"
    (tmp_path / "tests" / "test_x.py").write_text(source)
    assert node_ids(tmp_path) == {"tests/test_x.py::test_a"}


def test_components_are_classes_and_modules() -> None:
    assert {"FusedAdam", "fused_adam", "Compat"} <= COMPONENTS


def test_writing_the_page_changes_nothing_when_it_is_current(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = PAGE.read_text()
    assert main() == 0
    assert PAGE.read_text() == before
    assert "docs/reference/edges.md: 159 edges" in capsys.readouterr().out
