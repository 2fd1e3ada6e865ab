"""An empty success cannot look like a full one."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.report.exports import as_json, as_junit


def key_of(law: str) -> Key:
    return Key(operation="adamw_step", kernel="mine", dtype="bf16", law=law, engine="cpu")


def passed(law: str) -> Cell:
    return Cell(key=key_of(law), status=Status.PASSED, calls=3, worst={"params": 0.25})


def failed(law: str) -> Cell:
    return Cell(key=key_of(law), status=Status.FAILED, calls=3, failure="broken <here>\nmore")


def skipped(law: str) -> Cell:
    return Cell(key=key_of(law), status=Status.SKIPPED, reason="no GPU")


def ledger_of(*cells: Cell, declared: tuple[str, ...] = ("value", "repeat")) -> Ledger:
    ledger = Ledger(declared=tuple(key_of(law) for law in declared))
    for cell in cells:
        ledger.add(cell)
    return ledger


def test_all_declared_cells_passed_is_0() -> None:
    assert ledger_of(passed("value"), passed("repeat")).exit_code() == 0


def test_one_broken_cell_is_1_whatever_is_missing() -> None:
    assert ledger_of(failed("value")).exit_code() == 1


def test_fewer_cells_than_declared_is_3() -> None:
    ledger = ledger_of(passed("value"))
    assert ledger.exit_code() == 3
    assert [key.law for key in ledger.missing()] == ["repeat"]


def test_nothing_run_is_3_and_without_the_asked_device_4() -> None:
    assert ledger_of(declared=()).exit_code() == 3
    assert ledger_of(skipped("value"), skipped("repeat")).exit_code() == 3
    ledger = ledger_of(skipped("value"), skipped("repeat"))
    ledger.asked_device = "cuda"
    assert ledger.exit_code() == 4


def test_a_pass_without_a_call_is_refused() -> None:
    with pytest.raises(ValueError, match="without a single call"):
        Cell(key=key_of("value"), status=Status.PASSED)


def test_a_skip_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="without a reason"):
        Cell(key=key_of("value"), status=Status.SKIPPED)


def test_a_cell_is_recorded_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        ledger_of(passed("value"), passed("value"))


def test_json_has_a_schema_and_every_cell() -> None:
    document = json.loads(as_json(ledger_of(passed("value"), failed("repeat")), 1.5))
    assert document["schema"] == "parity/1"
    assert document["exit_code"] == 1
    assert [cell["status"] for cell in document["cells"]] == ["passed", "failed"]
    assert document["cells"][0]["worst"] == {"params": 0.25}


def test_junit_counts_and_escapes_failures() -> None:
    root = ElementTree.fromstring(as_junit(ledger_of(failed("value"), skipped("repeat"))))
    (suite,) = root
    counts = [suite.get(name) for name in ("tests", "failures", "skipped")]
    assert counts == ["2", "1", "1"]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "broken <here>"
