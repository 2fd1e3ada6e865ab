"""The page's measured parts are those of the results files, and say so where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinstep.benchmarks import unchanged
from twinstep.benchmarks.runs import page
from twinstep.parity.records.errors import UsageError

KEY = {"device": "a machine", "python": "3.11", "torch": "2.13", "triton": "3.7"}
RUN = {"load": 0.1, "seconds": 9, "failures": [], "alarms": 0, "looks": 15}


def row(name: str, family: str, middle: float) -> dict[str, Any]:
    """A row of a group."""
    ratio = [0.9 * middle, middle, 1.1 * middle]
    return {"name": name, "family": family, "version": "torch 1", "ms": 2.5} | {
        "times_ours": ratio,
        "of_ceiling": ratio,
    }


DOCUMENT = {
    "key": KEY,
    "stamp": {"time": "2026-01-02T03:04", "commit": "abc"},
    "load": 0.2,
    "seconds": 300,
    "cut": ["something: cut by the budget"],
    "problems": [],
    "errors": [],
    "groups": [
        {
            "operation": "sgd_step",
            "dtype": "fp32",
            "tensors": 1,
            "each": 2**24,
            "bytes": 2**28,
            "absent": {"apex": "apex is not installed"},
            "rows": [
                row("ours", "ours", 1.0),
                row("ours again", "ours", 1.01),
                row("torch", "peer", 1.5),
                row("slow", "peer", 1.05),
                row("quick", "peer", 0.5),
            ],
        }
    ],
}


def test_the_page_is_what_the_files_give() -> None:
    text = page.PAGE.read_text()
    made = page.page(text, page.RESULTS, page.UNCHANGED)
    assert text == made, "python -m twinstep.benchmarks.runs.page"
    assert text != page.page(text.replace("easured", "easure"), page.RESULTS, page.UNCHANGED)


def test_without_files_it_says_that_nothing_is_measured(tmp_path: Path) -> None:
    text = page.page(page.PAGE.read_text(), tmp_path / "a.json", tmp_path / "b.json")
    assert "Not yet measured" in text
    assert "Not yet run on unchanged code" in text


def test_the_table_names_the_faster_side_only_where_the_interval_does(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(DOCUMENT))
    lines = page.measured(file).splitlines()
    said = {line.split(" | ")[1]: line.split(" | ")[4] for line in lines if " | " in line}
    assert (said["torch"], said["slow"], said["quick"]) == ("ours", "not told apart", "theirs")
    assert said["apex"] == "apex is not installed"
    assert any("load before it began 0.2" in line for line in lines)
    assert "Left out: something: cut by the budget." in lines
    assert any("1.01 (0.91 to 1.11) in `sgd_step fp32 16,777,216`" in line for line in lines)


def test_outcomes_on_unchanged_code_are_added_up(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    failed = {**RUN, "failures": ["x: time grew"], "alarms": 1, "load": 3.0}
    file.write_text(json.dumps({"key": KEY, "runs": [RUN, failed]}))
    said = page.gated(file)
    assert "1 of 2 runs failed: x: time grew" in said
    assert "1 of 30 first looks" in said
    assert "load 0.1 to 3.0" in said


def test_runs_on_unchanged_code_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "one_run", lambda words: {**RUN, "words": words})
    file = tmp_path / "gate.json"
    for runs in (1, 3):
        assert unchanged.main(["--runs", str(runs), "--output", str(file), "--", "--times"]) == 0
        assert len(json.loads(file.read_text())["runs"]) == runs
    monkeypatch.setattr(unchanged, "one_run", lambda _: {**RUN, "failures": ["x: grew"]})
    assert unchanged.main(["--runs", "4", "--output", str(file)]) == 1
    monkeypatch.setattr(unchanged, "key_of", lambda: KEY)
    with pytest.raises(UsageError, match="is of another machine or version: .*torch was"):
        unchanged.main(["--runs", "5", "--output", str(file)])


def test_a_copy_is_the_checkout_as_it_is(tmp_path: Path) -> None:
    unchanged.copied(tmp_path / "copy")
    assert (tmp_path / "copy" / "twinstep" / "fast").is_dir()
    own = Path(unchanged.__file__)
    assert (tmp_path / "copy" / "benchmarks" / own.name).read_bytes() == own.read_bytes()
