"""The GPU check without a GPU: skipped by name, results as JSON; what judges can say no."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from twinstep.benchmarks import gpu_check, judged, predicted, sanitizer, timing
from twinstep.benchmarks import part as benchmark_part
from twinstep.benchmarks.gpu_check import ROWS, TOTAL_SECONDS, Row
from twinstep.benchmarks.part import (
    Broken,
    Figures,
    Job,
    Skipped,
    finished,
    require_gpu,
    run_jobs,
)
from twinstep.parity.laws import LAWS

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


ABSENT = "no CUDA GPU here"


@no_gpu_here
def test_without_a_gpu_every_part_is_skipped_by_name_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "deep" / "out"))
    assert gpu_check.main([]) == 0
    said = capsys.readouterr().out
    files = [*(tmp_path / "deep" / "out").iterdir()]
    assert [file.name for file in files] == ["gpu-check.json"]
    document = json.loads(files[0].read_text())
    assert document["machine"]["gpu"] is None
    assert [one["name"] for one in document["parts"]] == [row.name for row in ROWS]
    for one in document["parts"]:
        assert one["status"] == "skipped"
        assert one["reason"].startswith(ABSENT)
        assert one["name"] in said


@no_gpu_here
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_part_says_itself_that_it_needs_a_gpu(row: Row, tmp_path: Path) -> None:
    assert gpu_check.run_here(row, tmp_path / "part.json") == 0
    result = json.loads((tmp_path / "part.json").read_text())
    assert result["status"] == "skipped"
    assert result["reason"].startswith(ABSENT)


def test_all_parts_together_fit_into_eight_minutes() -> None:
    assert sum(row.seconds for row in ROWS) <= TOTAL_SECONDS < 480
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_every_part_has_a_prediction_that_fits() -> None:
    parts = gpu_check.predictions()
    assert [*parts] == [row.name for row in ROWS]
    seconds = {name: float(str(one["seconds"])) for name, one in parts.items()}
    assert sum(seconds.values()) < TOTAL_SECONDS
    # The last one has what all others save.
    for row in ROWS[:-1]:
        assert seconds[row.name] < row.seconds


def test_predictions_of_the_model_are_those_in_the_file() -> None:
    document = json.loads(gpu_check.PREDICTED.read_text())
    assert predicted.renewed(json.loads(gpu_check.PREDICTED.read_text())) == document


def test_no_part_takes_what_is_kept_for_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is quick, the second takes all that it gets."""
    clock, limits = [0.0], dict[str, float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "gpu_problem", lambda: ("", ""))

    def run(row: Row, seconds: float) -> Figures:
        limits[row.name] = seconds
        clock[0] += 5.0 if row is ROWS[0] else seconds
        return gpu_check.outcome(row, "passed", "")

    monkeypatch.setattr(gpu_check, "run_child", run)
    assert gpu_check.run_all(ROWS, tmp_path / "all.json") == 0
    saved = TOTAL_SECONDS - sum(row.seconds for row in ROWS) + ROWS[0].seconds - 5.0
    assert limits[ROWS[1].name] == pytest.approx(ROWS[1].seconds + saved)
    for row in ROWS[2:]:
        assert limits[row.name] == pytest.approx(row.seconds)
    assert clock[0] == pytest.approx(TOTAL_SECONDS)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (AssertionError("Torch not compiled"), Skipped, "torch was built without CUDA"),
        (RuntimeError("Found no NVIDIA driver on your system. Please"), Skipped, ABSENT),
        (RuntimeError("No CUDA GPUs are available"), Skipped, ABSENT),
        (
            RuntimeError("The NVIDIA driver on your system is too old (found version 11040). "),
            Broken,
            "torch cannot use the GPU: The NVIDIA driver on your system is too old",
        ),
        (RuntimeError("CUDA unknown error - this may be due to"), Broken, "CUDA unknown error"),
        (None, Broken, "torch.cuda.is_available"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_not_an_absent_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, kind: type, sentence: str
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(kind, match=sentence):
        require_gpu()


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Row:
    """A row whose module is made up by the test, and which needs no GPU."""
    monkeypatch.setattr(benchmark_part, "require_gpu", lambda: None)
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
    def run() -> Iterator[Figures]:
        yield {"elements": 3}
        if error is not None:
            raise error

    sys.modules["twinstep.benchmarks.made_up"].__dict__["run"] = run
    gpu_check.run_here(part, tmp_path / "part.json")
    result = json.loads((tmp_path / "part.json").read_text())
    assert (result["status"], result["reason"]) == (status, reason)
    assert result["figures"] == {"elements": 3}


def test_a_hanging_job_is_stopped_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = tmp_path / "beat"
    nested = f"import time\nwhile True:\n    open({str(beat)!r}, 'w').close()\n    time.sleep(0.05)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nested!r}])"
    for seconds in (2.0, 20.0, 200.0):
        job = Job("none", seconds=seconds, prefix=[sys.executable, "-c", outer])
        assert finished(job)[0] is None
        if beat.exists():
            break
    assert beat.exists(), "the nested process never ran, so nothing was shown"
    beat.unlink()
    time.sleep(0.3)
    assert not beat.exists()


def test_jobs_run_beside_one_another_with_their_environment() -> None:
    show = "import os, sys; print(os.environ['WHICH'], sys.argv[-1]); sys.exit(int(sys.argv[-1]))"
    jobs = [
        Job("x", [str(code)], prefix=[sys.executable, "-c", show], environment={"WHICH": "this"})
        for code in (0, 3)
    ]
    assert dict(run_jobs(jobs, 2)) == {0: (0, "this 0\n"), 1: (3, "this 3\n")}


def test_a_part_that_dies_without_a_result_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_part, "run_job", lambda job: (-11, "segfault"))
    result = gpu_check.run_child(ROWS[0], 5)
    assert result["status"] == "failed"
    assert "status -11" in str(result["reason"])
    assert result["output"] == "segfault"


def test_a_part_without_time_left_has_failed() -> None:
    assert gpu_check.run_child(ROWS[0], 0)["status"] == "failed"


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
    assert judged.verdict(0, json.dumps(document)) == {
        "verdict": "kept",
        "counts": counts,
        "seconds": 1.0,
    }
    broken = judged.verdict(1, json.dumps({"verdict": "3 of 9 cells broke a law"}), "more")
    assert broken["wrong"] == "ended with 1: 3 of 9 cells broke a law"
    assert broken["output"] == "more"
    assert judged.verdict(-9, "")["wrong"] == "ended with -9: no ledger was written"


def test_every_kernel_for_a_gpu_is_judged_by_every_law_once() -> None:
    rows = judged.subjects()
    names = [name for row in rows.values() for name in row]
    assert len(names) == len(set(names)) >= 30
    assert rows["fast.FusedAdam"] == ["fast.FusedAdam"]
    # A row that does not run on cuda has nothing judged, which fails the part.
    assert not [name for name in names if name.startswith(("native.", "cpu."))]
    by_class = judged.job_of("fast.FusedAdam", ["fast.FusedAdam"], Path("x")).arguments
    assert "--law" not in by_class
    by_operation = judged.job_of("cast_copy", rows["cast_copy"], Path("x")).arguments
    last = judged.job_of(judged.ALONE, (), Path("x")).arguments
    laws = {*by_operation[4:], *last} & {*LAWS}
    assert laws == {*LAWS}
    assert judged.ALONE not in by_operation
    assert last.count("--law") == 1


def test_timing_reports_the_median_of_the_ratios_of_neighbours() -> None:
    # The clock doubles half-way: each ratio is 1.5, the ratio of medians is not.
    copies = [1.0, 1.0, 1.0, 2.0, 2.0]
    figures = timing.summary([1.5 * ms for ms in copies], copies, moved=3_000_000)
    assert figures["of_the_copy_rate"] == round(1 / 1.5, 4)
    assert figures["of_the_copy_rate_quartiles"] == [round(1 / 1.5, 4)] * 2
    assert figures["work_gb_per_s"] == 2.0
