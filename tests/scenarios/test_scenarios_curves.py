"""Loss curves: sides are compared to the bit, the first step that differs is named and drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from twinstep import scenarios
from twinstep.scenarios import curves
from twinstep.scenarios.curves import Curve, losses_differ
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import Trace

OURS = Curve(
    side="reference",
    dtype="fp16",
    stage=2,
    ranks=1,
    losses=[3.0, 2.5, 2.0],
    skipped=[1],
    held_out=2.0,
)
WORDS = ["curves", "--steps", "2", "--dtype", "fp16", "--deepspeed", "/nowhere/python"]


@pytest.fixture(autouse=True)
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "STAGES", {2: "zero2"})


def test_equal_sides_are_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "c.json"), "--picture", str(tmp_path / "c.png")]
    assert scenarios.main([*WORDS, *files]) == 0
    said = capsys.readouterr().out
    assert "fp16  ZeRO 2  ranks 4  reference and fast: equal" in said
    assert "DeepSpeed: left out, /nowhere/python: No such file or directory" in said
    found = json.loads((tmp_path / "c.json").read_text())
    assert [row["differs"] for row in found["verdicts"]] == ["", ""]
    assert {len(losses) for losses in found["curves"].values()} == {2}
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_side_that_differs_is_named_with_step_and_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = curves.run

    def wrong(side: str, plan: Plan, count: int) -> Trace:
        trace = right(side, plan, 1)
        first, second = trace.records
        if side == "fast":
            return replace(trace, records=[first, replace(second, scale=1.0)])
        return trace

    monkeypatch.setattr(curves, "run", wrong)
    assert scenarios.main(WORDS) == 1
    said = capsys.readouterr().out
    assert "reference and fast: DIFFER step 2 scale: 0x1.0000000000000p+20 and 0x1.0" in said
    assert said.endswith("the sides differ\n")


def test_the_first_loss_that_another_run_has_otherwise_is_named() -> None:
    assert losses_differ(OURS, replace(OURS, side="DeepSpeed")) == ""
    other = replace(OURS, losses=[3.0, 2.5000000000000004, 1.0])
    assert losses_differ(OURS, other).startswith("step 2 loss: 0x1.4")
    assert losses_differ(OURS, replace(OURS, skipped=[])) == "step 1: only reference skips it"
    assert losses_differ(OURS, replace(OURS, held_out=2.5)) == "held-out loss: 2.0 and 2.5"
