"""Progress: a moving line on a terminal, plain lines to a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from twinstep.scenarios.progress import Lines, Live, reporter
from twinstep.scenarios.trace import StepRecord

STEP = StepRecord(step=1, loss=5.5, lr=1e-3, scale=2.0**20, norm=1.25, skipped=True, state="a")


def later(step: int) -> StepRecord:
    return StepRecord(step=step, loss=5.0, lr=1e-3, scale=2.0**19, norm=2, skipped=False, state="b")


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(Console(file=io.StringIO())) as told:
        assert isinstance(told, Lines)
        told.begin("run", 2)
        told.step(STEP)
        told.step(later(2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run"
    assert lines[2].endswith("1.25  skipped: the gradients overflowed")
    assert "524288" in lines[3]


def test_every_other_step_is_shown_and_the_last_one_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(every=2)
    lines.begin("run", 3)
    for record in (STEP, later(2), later(3)):
        lines.step(record)
    shown = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in shown] == ["2", "3"]
    assert shown[-1].endswith("1 skipped")


def test_a_terminal_gets_a_bar_with_loss_scale_norm_and_skips() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with reporter(screen) as told:
        assert isinstance(told, Live)
        told.begin("adam fp16", 2)
        told.step(STEP)
        told.step(later(2))
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "adam fp16" in printed
    assert "2/2" in printed
    assert "loss 5.0000  scale 524288  norm 2  1 skipped" in printed
