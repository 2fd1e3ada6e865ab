"""The judgement of fp16 and bf16 against fp32: what it takes, and that it can say no."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from twinstep import scenarios
from twinstep.scenarios import precision, train
from twinstep.scenarios.model import Shape
from twinstep.scenarios.plan import BROKEN, Plan
from twinstep.scenarios.precision import TracesUnfit, judge, plans
from twinstep.scenarios.trace import StepRecord, Trace, read, write
from twinstep.scenarios.trainers import OperationTrainer

TINY = Shape(context=8, width=6, layers=1)
HEADER = OperationTrainer(Plan(shape=TINY)).header("reference")
Losses = dict[str, Sequence[float]]


def run_of(dtype: str, seed: int, loss: float, before: float = 5.5, steps: int = 2) -> Trace:
    header = replace(HEADER, dtype=dtype, seed=seed, steps=steps)
    scale = 1024.0 if dtype == "fp16" else 1.0
    one = StepRecord(step=1, loss=5.0, lr=0.1, scale=scale, norm=1.0, skipped=False, state="a")
    records = [one, replace(one, step=2, loss=loss)]
    return Trace(header=header, records=records, held_out=(before, loss))


def runs(losses: Losses) -> list[Trace]:
    return [
        run_of(dtype, seed, loss)
        for dtype, values in losses.items()
        for seed, loss in enumerate(values)
    ]


FP32 = [2.0, 2.1, 1.9]  # the sample standard deviation is 0.1


def test_the_noise_is_the_sample_standard_deviation_of_fp32() -> None:
    judged = judge(runs({"fp32": FP32, "bf16": [2.05, 2.15, 1.95]}))
    assert judged.noise == pytest.approx(0.1)
    assert judged.difference(judged.others[0]) == pytest.approx(0.05)
    assert judged.fall == pytest.approx(3.5)
    assert judged.outside == []


@pytest.mark.parametrize("worse", [0.11, -0.11, math.nan, math.inf])
def test_a_mean_outside_the_noise_does_not_reach(worse: float) -> None:
    judged = judge(runs({"fp32": FP32, "fp16": FP32, "bf16": [loss + worse for loss in FP32]}))
    assert judged.outside == ["bf16"]


def test_scatter_of_its_own_does_not_help_a_dtype() -> None:
    assert judge(runs({"fp32": FP32, "fp16": [1.0, 2.0, 4.0]})).outside == ["fp16"]


def test_one_seed_that_is_lost_is_not_outweighed() -> None:
    assert judge(runs({"fp32": FP32, "fp16": [2.0, math.nan, 1.9]})).outside == ["fp16"]


def test_runs_that_did_not_learn_are_not_judged_equal() -> None:
    unmoved = [replace(run, held_out=(2.5, run.held_out[1])) for run in runs({"fp32": FP32})]
    judged = judge([*unmoved, *runs({"bf16": FP32})])
    assert judged.outside == []
    assert not judged.learned


@pytest.mark.parametrize(
    ("traces", "sentence"),
    [
        (runs({"fp32": FP32}), "should be in fp32 and another dtype"),
        (runs({"bf16": FP32}), "should be in fp32 and another dtype"),
        (runs({"fp32": [2.0], "bf16": [2.0]}), "1 seed, but should have at least 2"),
        (runs({"fp32": FP32, "bf16": FP32[:2]}), "bf16 has seeds"),
        (
            [*runs({"fp32": FP32}), *(run_of("bf16", s, 2.0, steps=3) for s in range(3))],
            "runs have steps",
        ),
        (
            [*runs({"fp32": FP32}), *(replace(r, records=[]) for r in runs({"bf16": FP32}))],
            "should have all of their plan's",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(traces: list[Trace], sentence: str) -> None:
    with pytest.raises(TracesUnfit, match=sentence):
        judge(traces)


@pytest.mark.parametrize("broken", ["scale-stuck", "no-masters"])
def test_a_run_that_is_broken_on_purpose_does_not_train_as_fp32_does(broken: str) -> None:
    steps = 40 if broken == "scale-stuck" else 24
    asked = [
        replace(plan, held_out=4, shape=TINY) for plan in plans(steps=steps, seeds=2, broken=broken)
    ]
    found = [train.run("reference", plan) for plan in asked]
    assert [run.header.dtype for run in found[::2]] == ["fp32", BROKEN[broken]]
    stuck, plain = found[2], found[0]
    if broken == "scale-stuck":
        assert len(stuck.skipped) == steps
        assert stuck.held_out[0] == stuck.held_out[1]
        assert judge(found).outside
    else:
        masters = train.run("reference", replace(asked[2], broken="none"))
        assert abs(masters.held_out[1] - plain.held_out[1]) < abs(
            stuck.held_out[1] - plain.held_out[1]
        )


@pytest.mark.parametrize(
    ("losses", "code", "says"),
    [
        ({"fp32": FP32, "fp16": FP32, "bf16": FP32}, 0, "equal: fp16 and bf16 within the noise"),
        ({"fp32": FP32, "fp16": [2.0, 2.4, 2.0]}, 1, "OUTSIDE: the mean loss of fp16"),
        ({"fp32": [2.0, 3.0, 4.0], "fp16": [2.0, 3.0, 4.0]}, 3, "too little ran"),
        ({"fp32": FP32}, 2, "should be in fp32 and another dtype"),
    ],
)
def test_the_command_says_so_by_exit_code(
    losses: Losses, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(runs(losses), tmp_path / "runs.jsonl")
    assert scenarios.main(["precision", "--traces", str(tmp_path / "runs.jsonl")]) == code
    printed = capsys.readouterr()
    assert says in printed.out + printed.err


def test_precision_trains_judges_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    monkeypatch.setattr(precision, "SHAPE", TINY)
    monkeypatch.setattr(precision, "HELD_OUT", 2)
    out, result, image = (tmp_path / name for name in ("r.jsonl", "r.json", "r.png"))
    words = ["precision", "--side", "reference", "--steps", "4", "--seeds", "2"]
    files = ["--out", str(out), "--json", str(result), "--picture", str(image)]
    assert scenarios.main([*words, *files]) in (0, 1, 3)
    found = read(out)
    assert [run.header.dtype for run in found] == ["fp32"] * 2 + ["fp16"] * 2 + ["bf16"] * 2
    assert image.read_bytes().startswith(b"\x89PNG")
    told = json.loads(result.read_text())
    assert [row["dtype"] for row in told["rows"]] == ["fp32", "fp16", "bf16"]
    assert told["rows"][2]["held_out"] == [run.held_out[1] for run in found[4:]]
    printed = capsys.readouterr().out
    assert "adam fp16, reference, seed 1" in printed
    assert "\x1b" not in printed
