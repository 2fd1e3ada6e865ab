"""The commands: exit codes, one sentence for a wrong request, files written where asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from twinstep import scenarios
from twinstep.scenarios import lockstep, text, trace
from twinstep.scenarios.calls import Answer, Call, Written, reference_answer

SHORT = ["--steps", "2", "--dtype", "bf16"]


def off_by_one(call: Call) -> Written:
    written = reference_answer(call)
    if call.operation == "mixed_step":
        written["cur_iter"] = call.controls["cur_iter"] + 2
    return written


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Put another side in the place of the fast one."""
    return lambda answer: monkeypatch.setattr(lockstep, "answer_of", lambda *_: answer)


def test_equal_sides_exit_0(
    against: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    against(reference_answer)
    assert scenarios.main(["lockstep", *SHORT]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("equal: every bit, on every step")
    assert "\x1b" not in out


def test_sides_that_differ_exit_1_and_show_both(
    against: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    against(off_by_one)
    assert scenarios.main(["lockstep", *SHORT]) == 1
    out = capsys.readouterr().out
    assert (
        "DIFFERS step 1 mixed_step[list] cur_iter differs from the reference, 1 of 1 elements do"
        in out
    )
    assert "want     0  0x0" in out
    assert "got      2  0x2" in out


def test_all_dtypes_are_run_one_after_the_other(
    against: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    against(reference_answer)
    assert scenarios.main(["lockstep", "--dtype", "all", "--steps", "1"]) == 0
    assert capsys.readouterr().out.count("equal: every bit") == 3


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["lockstep", "--dtype", "float8"],
        ["lockstep", "--steps", "0"],
        ["lockstep", "--steps", "many"],
        ["train", "--seed", "-1"],
        ["train", "--side", "slow"],
        ["train", "--out", "no/such/folder/run.jsonl"],
        ["train", "--picture", "no/such/folder/run.png"],
        ["train", "--picture", "run.tiff"],
        ["train", "--seeds", "2", "--stop", "1"],
        ["train", "--ranks", "0"],
        ["train", "--ranks", "3", "--accumulate", "2"],
        ["train", "--ranks", "2", "--accumulate", "3"],
        ["train", "--resume", "absent.pt"],
        ["train", "--broken", "no-masters", "--dtype", "fp16"],
        ["train", "--broken", "no-masters", "--dtype", "bf16", "--optimizer", "zero1"],
        ["train", "--optimizer", "zero2", "--rule", "torch"],
        ["train", "--exact-sums"],
        ["train", "--offload"],
        ["train", "--save-every", "2"],
        ["memory", "--parameters", "0"],
        ["precision", "--seeds", "1"],
        ["precision", "--traces", "absent.jsonl"],
        ["compare", "absent.jsonl", "absent.jsonl"],
        ["picture", "absent.jsonl", "x.png"],
        ["picture", __file__, "x.png"],
    ],
)
def test_wrong_requests_exit_2_without_traceback(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert scenarios.main(argv) == 2
    err = capsys.readouterr().err
    assert err
    assert "Traceback" not in err


def test_a_python_without_source_exits_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert scenarios.main(["train", *SHORT]) == 2
    assert f"of {len(text.MODULES)} standard library modules" in capsys.readouterr().err


def test_train_writes_a_trace_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    out, image = tmp_path / "run.jsonl", tmp_path / "run.png"
    argv = ["train", "--steps", "3", "--out", str(out), "--picture", str(image)]
    assert scenarios.main(argv) == 0
    (run,) = trace.read(out)
    assert len(run.records) == 3
    assert image.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.svg"
    assert scenarios.main(["picture", str(out), str(again)]) == 0
    assert b"<svg" in again.read_bytes()


def test_a_run_broken_in_two_is_found_equal_to_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halves, saved = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.pt"))
    run = ["train", "--steps", "4", "--dtype", "fp32"]
    assert scenarios.main([*run, "--out", whole]) == 0
    assert scenarios.main([*run, "--stop", "2", "--save", saved]) == 0
    assert scenarios.main([*run, "--resume", saved, "--out", halves]) == 0
    assert scenarios.main(["compare", whole, halves]) == 0
    assert capsys.readouterr().out.endswith("equal: every step of 1 run\n")


def test_compare_names_the_first_difference_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run = ["train", "--dtype", "fp32", "--steps", "1", "--optimizer", "mixed_step"]
    assert scenarios.main([*run, "--out", str(first)]) == 0
    text = first.read_text()
    second.write_text(text.replace('"norm": "0x1', '"norm": "0x2'))
    assert scenarios.main(["compare", str(first), str(second)]) == 1
    assert "DIFFERS run 1 step 1 norm: " in capsys.readouterr().out
    second.write_text(text + text)
    assert scenarios.main(["compare", str(first), str(second)]) == 1


def test_without_matplotlib_a_picture_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert scenarios.main(["train", *SHORT, "--picture", str(tmp_path / "x.png")]) == 2
    assert "a picture needs matplotlib" in capsys.readouterr().err


def test_the_package_runs_with_dash_m() -> None:
    command = [sys.executable, "-W", "error", "-m", "twinstep.scenarios", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
