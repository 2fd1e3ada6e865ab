"""The GPU check without a GPU: skipped by name, results as JSON; what judges can say no."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from twinstep.benchmarks import gpu_check, judged, sanitizer, timing
from twinstep.benchmarks.gpu_check import ROWS, TOTAL_SECONDS, Row
from twinstep.benchmarks.part import Broken, Figures, Skipped

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@no_gpu_here
def test_without_a_gpu_every_part_is_skipped_by_name_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "deep" / "out"))
    assert gpu_check.main([]) == 0
    said = capsys.readouterr().out
    summary = json.loads((tmp_path / "deep" / "out" / "gpu-check.json").read_text())
    assert summary["machine"]["gpu"] is None
    assert [part["name"] for part in summary["parts"]] == [row.name for row in ROWS]
    for part in summary["parts"]:
        assert (part["status"], part["reason"]) == ("skipped", "no CUDA GPU here")
        assert json.loads((tmp_path / "deep" / "out" / f"{part['name']}.json").read_text()) == part
        assert part["name"] in said


@no_gpu_here
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_part_says_itself_that_it_needs_a_gpu(row: Row, tmp_path: Path) -> None:
    assert gpu_check.run_here(row, tmp_path) == 0
    result = json.loads((tmp_path / f"{row.name}.json").read_text())
    assert (result["status"], result["reason"]) == ("skipped", "no CUDA GPU here")


def test_all_parts_together_stay_under_six_minutes_and_leave_eight_files() -> None:
    assert TOTAL_SECONDS < 360
    assert len({row.name for row in ROWS}) == len(ROWS) <= 7


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Row:
    """A row whose module is made up by the test, and which needs no GPU."""
    monkeypatch.setattr(gpu_check, "require_gpu", lambda: None)
    module = ModuleType("twinstep.benchmarks.made_up")
    monkeypatch.setitem(sys.modules, "twinstep.benchmarks.made_up", module)
    return Row("made-up", "made_up", 5, "nothing")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (None, "passed", ""),
        (Skipped("no tool"), "skipped", "no tool"),
        (Broken("bits differ"), "failed", "bits differ"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError: x"),
    ],
)
def test_a_parts_end_becomes_its_status(
    part: Row, tmp_path: Path, error: Exception | None, status: str, reason: str
) -> None:
    def run() -> Figures:
        if error is not None:
            raise error
        return {"elements": 3}

    sys.modules["twinstep.benchmarks.made_up"].__dict__["run"] = run
    gpu_check.run_here(part, tmp_path)
    result = json.loads((tmp_path / "made-up.json").read_text())
    assert (result["status"], result["reason"]) == (status, reason)
    assert (result.get("figures") == {"elements": 3}) == (error is None)


def test_a_hanging_part_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    nested = f"import time\nwhile True:\n    open({str(beat)!r}, 'w').close()\n    time.sleep(0.05)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nested!r}])"
    status, _ = gpu_check.run_group([sys.executable, "-c", outer], 2.0)
    assert status is None
    assert beat.exists(), "the nested process never ran, so nothing was shown"
    beat.unlink()
    time.sleep(0.3)
    assert not beat.exists()


def test_a_part_that_dies_without_a_result_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "run_group", lambda command, seconds: (-11, "segfault"))
    (tmp_path / "large.json").write_text('{"status": "passed"}')  # of an earlier run
    row = next(row for row in ROWS if row.name == "large")
    result = gpu_check.run_child(row, tmp_path, 5)
    assert result["status"] == "failed"
    assert "status -11" in str(result["reason"])
    assert result["output"] == "segfault"


def test_a_part_without_time_left_has_failed(tmp_path: Path) -> None:
    assert gpu_check.run_child(ROWS[0], tmp_path, 0)["status"] == "failed"


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def test_the_sanitizers_verdict_is_read() -> None:
    assert sanitizer.judge("memcheck", 0, CLEAN) == "ERROR SUMMARY: 0 errors"
    with pytest.raises(Broken, match="Invalid __global__ write"):
        sanitizer.judge("memcheck", 99, "========= Invalid __global__ write of size 4")
    with pytest.raises(Broken, match="no summary"):
        sanitizer.judge("memcheck", 0, "")
    with pytest.raises(Skipped, match="Device not supported"):
        sanitizer.judge("memcheck", 1, "========= Error: Device not supported. Please refer")


def test_the_ledgers_verdict_is_passed_on() -> None:
    counts = {"passed": 2, "failed": 0}
    document = {"verdict": "kept", "counts": counts, "seconds": 1.0, "environment": {}, "cells": []}
    assert judged.verdict(0, json.dumps(document))["counts"] == counts
    with pytest.raises(Broken, match="ended with 1: 3 of 9 cells broke a law"):
        judged.verdict(1, json.dumps({"verdict": "3 of 9 cells broke a law"}))
    with pytest.raises(Broken, match="ended with -9: no ledger was written"):
        judged.verdict(-9, "")


def test_timing_reports_the_median_of_the_ratios_of_neighbours() -> None:
    # The clock doubles half-way: each ratio is 1.5, the ratio of medians is not.
    copies = [1.0, 1.0, 1.0, 2.0, 2.0]
    figures = timing.summary([1.5 * ms for ms in copies], copies, moved=3_000_000)
    assert figures["ratio_to_copy"] == 1.5
    assert figures["ratio_quartiles"] == [1.5, 1.5]
    assert figures["work_gb_per_s"] == 2.0
