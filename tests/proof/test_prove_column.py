"""The column of proofs: in the ledger, the table, JSON and JUnit; only a refutation fails."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.command import parity
from tests.helpers.proved_kernels import by_torch, row
from twinstep.parity.prove import rows
from twinstep.parity.prove.rows import Limits, beside, prove_row, proved_rows
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.records.proof import (
    ENDED,
    OUT_OF_TIME,
    PROVED,
    REFUTED,
    WORDS,
    Proof,
    Verdict,
)
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report import progress
from twinstep.parity.report.exports import as_json, as_junit
from twinstep.parity.report.table import print_table
from twinstep.parity.runner.load_file import load_file

KEY = Key(operation="adamw_step", kernel="mine", dtype="fp32", law="value", engine="cpu")
FILE = """
import os, signal
import torch
from twinstep.parity import register

@register("clip_coefficient", arithmetic="exact", dtypes=("scalar",), layouts=())
def mine(*, norm, max_norm, factor):
    k = max_norm / (norm.double() + 1e-6)
    factor.copy_((k if max_norm > 0 and k < 1 else torch.ones_like(k)).float())

@register("clip_coefficient", arithmetic="exact", dtypes=("scalar",), layouts=())
def ends(*, norm, max_norm, factor):
    os.kill(os.getpid(), signal.SIGKILL)
"""

HANGS = """
import time
from twinstep.parity import register

@register("unscale", arithmetic="exact", dtypes=("fp32", "fp16", "bf16"), engines=("cpu",))
def hangs(grads, *, inv_scale, found_inf):
    time.sleep(60)
"""


def ledger(word: str) -> Ledger:
    """A run with one law kept and one proof."""
    found = Ledger(declared=(KEY,))
    found.add(Cell(key=KEY, status=Status.PASSED, calls=1))
    assumes = ("torch is torch",)
    verdict = Verdict(
        word, "" if word == PROVED else f"because of {word}", assumes=assumes, kept={"steps": (4,)}
    )
    proof = Proof(
        kernel="mine", operation="adamw_step", dtype="fp32", place="flat 70", verdict=verdict
    )
    found.proofs.append(proof)
    return found


def shown(run: Ledger) -> str:
    screen = io.StringIO()
    print_table(Console(file=screen, width=100), run)
    return screen.getvalue()


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_in_the_table_the_json_and_the_junit(word: str) -> None:
    run = ledger(word)
    assert run.exit_code() == (EXIT_BROKEN if word == REFUTED else EXIT_KEPT)
    assert ("refuted" in run.verdict()) == (word == REFUTED)
    text = shown(run)
    assert word in text
    assert ("1 of 1 rows proved" in text) == (word == PROVED)
    assert ("torch is torch" in text) == (word == PROVED)
    assert (f"because of {word}" in text) == (word != PROVED)
    (record,) = json.loads(as_json(run, 1.0))["proofs"]
    assert record["word"] == word
    suite = next(s for s in ElementTree.fromstring(as_junit(run)) if s.get("name") == "proofs")
    failed, skipped = (suite.find(f"testcase/{name}") for name in ("failure", "skipped"))
    assert (failed is not None) == (word == REFUTED)
    assert (skipped is not None) == (word not in (REFUTED, PROVED))


def test_a_rejected_row_is_not_among_the_proved_ones() -> None:
    run, other = ledger(PROVED), replace(KEY, dtype="bf16")
    run.add(Cell(key=other, status=Status.FAILED, failure="mine breaks `repeat`", calls=1))
    run.proofs.append(replace(run.proofs[0], dtype="bf16"))
    text = shown(run)
    assert "1 of 1 rows that broke no law are proved for every value" in text
    assert re.search(r"mine .* 1/2", text)
    del run.cells[KEY], run.proofs[0]
    text = shown(run)
    assert "proofs: not counted, each row broke a law" in text
    assert "rows proved" not in text


def test_without_proofs_the_table_has_no_column() -> None:
    run = Ledger(declared=(KEY,))
    run.add(Cell(key=KEY, status=Status.PASSED, calls=1))
    assert "proved" not in shown(run)


def test_a_row_that_is_over_its_time_says_so() -> None:
    found = prove_row(row(by_torch(), "cpu"), "fp32", Limits(row=0.0))
    assert {proof.verdict.word for proof in found} == {OUT_OF_TIME}
    assert "parity prove has no such limit" in found[0].verdict.detail


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_a_kernel_that_ends_its_process_costs_its_own_row_alone(file: str) -> None:
    known = load_file(file).kernels
    found = [p for own in proved_rows(file, known, Selection(), rows.FILE, 2) for p in own]
    assert {p.kernel: p.verdict.word for p in found} == {"mine": PROVED, "ends": ENDED}, found


def test_processes_that_hang_share_the_time_of_one(tmp_path: Path) -> None:
    path = tmp_path / "hangs.py"
    path.write_text(HANGS)
    limits = Limits(situation=1.0, row=1.0, total=2.0, hang=60.0, waits=2.0)
    known = load_file(str(path)).kernels
    found = [p for own in proved_rows(str(path), known, Selection(), limits, 1) for p in own]
    assert [p.verdict.word for p in found] == [OUT_OF_TIME] * 3, found
    assert found[0].verdict.detail == "no end after 2 s of waiting"
    assert all("time of all proofs" in p.verdict.detail for p in found[1:])


def test_the_proof_says_within_seconds_what_it_does(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress.FIRST <= 5.0
    assert progress.EVERY <= 10.0
    monkeypatch.setattr(progress, "FIRST", 0.01)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    assert parity("prove", file) == EXIT_TOO_LITTLE
    said = capsys.readouterr()
    assert "proving mine scalar: 0 of 2 rows" in said.err
    assert "1 proved, 1 ended" in said.out


def test_a_choice_of_laws_leaves_proofs_out(file: str) -> None:
    with beside(file, [], Selection(laws=("value",)), rows.FILE) as proved:
        assert proved() == []
