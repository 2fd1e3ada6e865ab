"""`python -m twinstep.parity` knows the commands of scenarios, golden traces and benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import parity

Capture = pytest.CaptureFixture[str]


def test_scenario_list_names_the_scenario_commands(capsys: Capture) -> None:
    assert parity("scenario", "list") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("lockstep", "train", "precision", "compare", "picture"))


def test_scenario_run_hands_its_words_on(tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "run.jsonl"
    assert parity("scenario", "run", "train", "--steps", "1", "--out", str(trace)) == 0
    assert "1 steps" in capsys.readouterr().out
    assert json.loads(trace.read_text().splitlines()[0])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["scenario", "run"], "required: command"),
        (["scenario", "run", "lockstep", "--steps", "0"], "at least 1"),
        (
            ["scenario", "run", "overflow_brust"],
            'scenarios: command "overflow_brust" is unknown, but should be one of those that '
            "parity scenario list lists; did you mean overflow_burst?",
        ),
        (["golden", "record", "nobody"], "usage: python -m twinstep.golden.record"),
        (["bench", "gpu-check", "--only", "nothing"], "invalid choice"),
    ],
)
def test_wrong_words_are_2(argv: list[str], says: str, capsys: Capture) -> None:
    try:
        assert parity(*argv) == 2
    finally:
        assert says in capsys.readouterr().err


def test_the_help_names_all_of_them(capsys: Capture) -> None:
    assert parity("--help") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("scenario", "golden", "bench", "traffic", "compile"))


def test_nothing_is_printed_after_the_last_line_of_a_command() -> None:
    # Triton 3.9 prints each of its objects that the end of the process has left alive.
    ended = subprocess.run(
        [sys.executable, "-m", "twinstep.parity", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout
    assert not ended.stderr
