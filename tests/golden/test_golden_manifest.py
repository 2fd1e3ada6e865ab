"""The manifest of traces: what is done to a file is noticed, each with its own sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.command import parity
from twinstep.golden import manifest, page, record
from twinstep.golden.record import ALL, keep, name_of
from twinstep.golden.trace import TRACES, Trace, digest, from_text, read

NAME = "deepspeed_dynamic_window_of_two"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the traces."""
    return Path(shutil.copytree(TRACES, tmp_path / "traces"))


def rewritten(change: Callable[[list[str]], object]) -> Callable[[Path], None]:
    """A change of the lines of one trace."""

    def write(folder: Path) -> None:
        path = folder / f"{NAME}.jsonl"
        lines = path.read_text().splitlines()
        change(lines)
        path.write_text("\n".join(lines) + "\n")

    return write


def swap(lines: list[str]) -> None:
    lines[3], lines[5] = lines[5], lines[3]


def corrupt(lines: list[str]) -> None:
    assert "p+5" in lines[3]
    lines[3] = lines[3].replace("p+5", "p+6")


def other_version(lines: list[str]) -> None:
    lines[0] = lines[0].replace("0.19.8", "0.19.9")


def other_constant(lines: list[str]) -> None:
    lines[0] = lines[0].replace('"scale_window": 2', '"scale_window": 3')


DONE = {
    "nothing": (lambda folder: None, None),
    "deleted": (
        lambda folder: (folder / f"{NAME}.jsonl").unlink(),
        f"{NAME}: the file is gone, but the manifest has it; record it again",
    ),
    "added": (
        lambda folder: shutil.copy(folder / f"{NAME}.jsonl", folder / "torch_stray.jsonl"),
        "torch_stray: the file is there, but the manifest does not have it; record it with",
    ),
    "a digit": (
        rewritten(corrupt),
        f"{NAME}: the line of step 2 is not what was recorded (line 4)",
    ),
    "two lines": (rewritten(swap), f"{NAME}: lines 4 and 6 were recorded in another order"),
    "a version": (
        rewritten(other_version),
        f"{NAME}: the header has version 0.19.9 of deepspeed, but 0.19.8 was recorded",
    ),
    "a constant": (
        rewritten(other_constant),
        f"{NAME}: the header is not what was recorded (line 1)",
    ),
    "a lost line": (
        rewritten(lambda lines: lines.pop()),
        f"{NAME}: the file has 14 lines, but 15 were recorded",
    ),
    "no header": (rewritten(lambda lines: lines.insert(0, "?")), f"{NAME}: its first line should"),
}


@pytest.mark.parametrize("what", DONE)
def test_what_is_done_to_a_file_is_said(what: str, folder: Path) -> None:
    change, sentence = DONE[what]
    change(folder)
    said = manifest.faults(folder)
    if sentence is None:
        assert said == []
    else:
        (only,) = said
        assert only.startswith(sentence)


def test_the_command_says_it_and_ends_with_1(folder: Path, capsys: Capture) -> None:
    (folder / f"{NAME}.jsonl").unlink()
    words = ["--folder", str(folder), "--side", "reference"]
    assert parity("golden", "verify", NAME, *words) == 1
    assert "the file is gone" in capsys.readouterr().out
    shutil.copy(TRACES / f"{NAME}.jsonl", folder)
    assert parity("golden", "verify", NAME, *words) == 0
    assert "1 traces replayed, 0 disagreements" in capsys.readouterr().out


def test_a_name_that_no_trace_begins_with_is_wrong_usage(capsys: Capture) -> None:
    assert parity("golden", "verify", "deepspeed_flat_cliped") == 2
    assert capsys.readouterr().err == (
        'parity: trace "deepspeed_flat_cliped" is unknown, but should be one of those that parity '
        "golden list lists; did you mean deepspeed_flat_clipped?\n"
    )


def test_a_digest_leaves_the_version_out() -> None:
    trace = read(TRACES / f"{NAME}.jsonl")
    text = (TRACES / f"{NAME}.jsonl").read_text()
    other = from_text(text.replace("0.19.8", "0.20.0"), "here")
    assert digest(other) == digest(trace)
    changed = from_text(text.replace('"scale_window": 2', '"scale_window": 3'), "here")
    assert digest(changed) != digest(trace)


def test_torch_is_recorded_again_to_equal_digests(tmp_path: Path, capsys: Capture) -> None:
    assert record.main(["torch", str(tmp_path)]) == 0
    assert "18 traces recorded" in capsys.readouterr().out
    before, again = manifest.read(), manifest.read(tmp_path)
    assert len(again) == 18
    assert all(before[name].digest == entry.digest for name, entry in again.items())
    assert manifest.faults(tmp_path) == []
    assert record.main(["torch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 1  # nothing new, nothing changed


def test_our_own_are_recorded_again_to_equal_digests(tmp_path: Path, capsys: Capture) -> None:
    assert parity("golden", "record", "twinstep", str(tmp_path)) == 0
    assert "6 traces recorded" in capsys.readouterr().out
    before, again = manifest.read(), manifest.read(tmp_path)
    assert len(again) == 6
    assert all(before[name].digest == entry.digest for name, entry in again.items())


def test_another_outcome_is_written_only_with_a_reason(folder: Path) -> None:
    old = read(folder / f"{NAME}.jsonl")
    steps = [{**step, "scale": 3.0} for step in old.steps]
    new = Trace(header=old.header, steps=steps)
    situations = {name_of(run): run for run in ALL}
    lines, refused = keep([new], "deepspeed", situations, folder, None)
    assert lines == []
    assert refused == [f"{NAME}: it was recorded otherwise; give a --reason to overwrite it"]
    assert manifest.faults(folder) == []
    lines, refused = keep([new], "deepspeed", situations, folder, "a new rule")
    assert (lines, refused) == ([f"{NAME}: changed, because a new rule"], [])
    assert manifest.faults(folder) == []
    assert manifest.read(folder)[NAME].changes == ("first recorded", "a new rule")


def test_a_manifest_that_is_none_is_said(folder: Path) -> None:
    path = folder / manifest.NAME
    path.write_text(json.dumps({"schema": 9, "traces": {}}))
    assert "its schema is 9, but should be 1" in manifest.faults(folder)[0]
    path.unlink()
    assert "should hold manifest.json, but does not" in manifest.faults(folder)[0]


@pytest.mark.parametrize("arguments", [[], ["apex"], ["torch", "a", "b"]], ids=str)
def test_the_recorder_refuses_wrong_usage(arguments: list[str], capsys: Capture) -> None:
    assert record.main(arguments) == 2
    assert "usage: python -m twinstep.golden.record" in capsys.readouterr().err


def test_the_page_has_the_table_of_the_manifest() -> None:
    text = page.PAGE.read_text()
    assert page.rendered(text) == text
    assert text.count("\n| torch_") == 18


def test_a_trace_is_shown_and_drawn(tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "trace.svg"
    name = "deepspeed_flat_clipped"
    assert parity("golden", "show", name, "--picture", str(picture)) == 0
    out = capsys.readouterr().out
    assert "skipped ..x.." in out
    assert "2     infinity, skipped  8" in out
    assert picture.read_text().startswith("<?xml")
    assert parity("golden", "show", "nothing") == 2


def test_two_traces_are_compared(capsys: Capture) -> None:
    names = ("deepspeed_zero_stage_one", "deepspeed_zero_stage_two")
    assert parity("golden", "diff", *names) == 1
    out = capsys.readouterr().out
    assert out == f"constant stage: 1 in {names[0]}, 2 in {names[1]}\n"
    assert parity("golden", "diff", names[0], names[0]) == 0
    assert parity("golden", "list") == 0
    assert "114 traces" in capsys.readouterr().out
