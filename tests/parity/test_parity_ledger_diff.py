"""A change that loosens is named and fails; cells of our own cannot go away unseen."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import twinstep.parity.expected.bounds
from tests.helpers.command import parity, sentences
from twinstep.parity.expected.widths import widths
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels, registrations
from twinstep.parity.report.declared_cells import (
    Floor,
    cells_of,
    declared_floor,
    floor_of,
    not_judged,
    sunk,
)
from twinstep.parity.report.exports import as_json
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.registry import Twin, borrowed_twins, twins

Document = dict[str, Any]
Capture = pytest.CaptureFixture[str]
BOUND = "adamw_step bf16 params"


def cell(law: str, status: Status = Status.PASSED, **more: Any) -> Cell:
    key = Key(operation="adamw_step", kernel="mine", dtype="bf16", law=law, engine="cpu")
    reason = "" if status in (Status.PASSED, Status.FAILED) else "for a reason"
    values: dict[str, Any] = {"calls": 12, "elements": 99, "arithmetic": "bounded", **more}
    return Cell(key=key, status=status, reason=reason, **values)


@pytest.fixture(scope="module")
def document() -> Document:
    ledger = Ledger()
    for row in (cell("value"), cell("repeat"), cell("non_finite", Status.SKIPPED)):
        ledger.add(row)
    found: Document = json.loads(as_json(ledger, 1.0))
    return found


def compared(folder: Path, old: object, new: object) -> int:
    for name, content in (("old.json", old), ("new.json", new)):
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return parity("ledger", "diff", str(folder / "old.json"), str(folder / "new.json"))


def test_nothing_changed_is_0(document: Document, tmp_path: Path, capsys: Capture) -> None:
    assert compared(tmp_path, document, document) == 0
    assert "0 looser, 0 tighter" in capsys.readouterr().out


def gone(new: Document) -> None:
    del new["cells"][0]


def unclaimed(new: Document) -> None:
    new["cells"][0] |= {"status": "not claimed", "reason": "mine does not claim bf16"}


def skipped(new: Document) -> None:
    new["cells"][0] |= {"status": "skipped", "reason": "too slow"}


def failed(new: Document) -> None:
    new["cells"][1]["status"] = "failed"


def fewer(new: Document) -> None:
    new["cells"][1]["calls"] = 11


def smaller(new: Document) -> None:
    new["cells"][1]["elements"] = 98


def bounded(new: Document) -> None:
    new["cells"][0]["arithmetic"] = "bounded"


def wider(new: Document) -> None:
    new["bounds"][BOUND] *= 1.01


@pytest.mark.parametrize(
    ("loosen", "says"),
    [
        (gone, "adamw_step mine bf16 value on cpu: was passed, is gone"),
        (unclaimed, "passed, now not claimed (mine does not claim bf16)"),
        (skipped, "passed, now skipped (too slow)"),
        (failed, "repeat on cpu: passed, now failed"),
        (fewer, "12 calls, now 11"),
        (smaller, "99 elements, now 98"),
        (bounded, "exact, now bounded"),
        (wider, f"{BOUND}: bound of"),
    ],
)
def test_whatever_becomes_looser_is_1_and_the_way_back_is_0(
    document: Document,
    tmp_path: Path,
    capsys: Capture,
    loosen: Callable[[Document], None],
    says: str,
) -> None:
    old = copy.deepcopy(document)
    old["cells"][0]["arithmetic"] = "exact"
    new = copy.deepcopy(old)
    loosen(new)
    assert compared(tmp_path, old, new) == 1
    out = capsys.readouterr().out
    assert f"looser: {says}" in out or says in out
    assert "1 looser" in out
    assert compared(tmp_path, new, old) == 0


@pytest.mark.parametrize(
    ("old", "says"),
    [
        ("{", "old.json is no JSON"),
        ({"schema": "parity/0"}, "has schema 'parity/0', but should have 'parity/1'"),
        ([], "has schema None"),
    ],
)
def test_what_is_no_ledger_is_2_in_one_sentence(
    document: Document, tmp_path: Path, capsys: Capture, old: object, says: str
) -> None:
    assert compared(tmp_path, old, document) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(sentences(captured.err)) == 1


def test_a_missing_file_is_2(capsys: Capture) -> None:
    assert parity("ledger", "diff", "nowhere.json", "nowhere.json") == 2
    assert "nowhere.json cannot be read: No such file" in capsys.readouterr().err


def test_a_wider_bound_moves_the_recorded_width(
    document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BOUND in document["bounds"]
    operation = operation_named("adamw_step", "test")
    before = widths([operation])
    assert before == widths([operation]), "the same inputs in every run"
    assert {key: before[key] for key in before} == document["bounds"]
    monkeypatch.setattr(
        twinstep.parity.expected.bounds, "ROUNDING", 1.5 * twinstep.parity.expected.bounds.ROUNDING
    )
    after = widths([operation])
    assert all(after[name] > before[name] for name in before)


@pytest.fixture
def ours() -> Iterator[tuple[tuple[Kernel, ...], tuple[Twin, ...]]]:
    with registrations(), borrowed_twins():
        register_house()
        register_our_optimizers()
        yield kernels(), twins()


Ours = tuple[tuple[Kernel, ...], tuple[Twin, ...]]


def test_our_kernels_are_judged_by_everything_that_is_declared(ours: Ours) -> None:
    assert sunk(declared_floor(), floor_of(*ours)) == []


def test_every_kernel_and_optimizer_of_ours_is_declared(ours: Ours) -> None:
    assert set(declared_floor()) == {row.name for rows in ours for row in rows}


def changed(floor: Floor, kernel: str, **rows: str) -> Floor:
    return {**floor, kernel: {**floor[kernel], **rows}}


def test_a_kernel_dtype_law_or_exactness_that_goes_away_is_named(ours: Ours) -> None:
    floor = floor_of(*ours)
    name = "triton.accumulate"
    (dtypes, laws), *_ = [row for row in floor[name].items() if row[0] != "arithmetic"]
    without = {key: rows for key, rows in floor.items() if key != name}
    assert f"{name} bf16 value: declared, but not judged" in sunk(floor, without)
    fewer_dtypes = {**floor, name: {"arithmetic": "exact", "fp32": laws}}
    assert any(f"{name} bf16 " in line for line in sunk(floor, fewer_dtypes))
    fewer_laws = changed(floor, name, **{dtypes: laws.replace(", repeat", "")})
    assert any(
        line.endswith("repeat: declared, but not judged") for line in sunk(floor, fewer_laws)
    )
    looser = changed(floor, name, arithmetic="bounded")
    assert sunk(floor, looser) == [f"{name}: declared exact, but bounded"]
    assert sunk(fewer_laws, floor) == [], "more than declared is no fault"


def test_a_run_that_left_cells_out_is_named(ours: Ours) -> None:
    floor = {"mine": {"arithmetic": "exact", "bf16": "value, repeat, non_finite"}}
    ledger = Ledger()
    for row in (cell("value"), cell("repeat", Status.NOT_CLAIMED)):
        ledger.add(row)
    assert not_judged(floor, ledger) == [
        "mine bf16 non_finite: declared, but absent",
        "mine bf16 repeat: declared, but not claimed",
    ]
    assert len(cells_of(floor)) == 3
