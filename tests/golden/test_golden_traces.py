"""Recorded loss scaling: the reference repeats every trace, and a changed digit is noticed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from twinstep.contract.compat import Compat
from twinstep.golden import record, record_torch
from twinstep.golden.sequences import SITUATIONS
from twinstep.golden.trace import TRACES, Trace, from_text, read, read_all, to_text
from twinstep.parity.proof.gates.golden_traces import first_difference, replayed
from twinstep.parity.proof.upstream.edges import edge_ids

ALL = read_all()
TORCH = [situation for situation in SITUATIONS if situation.rule == "torch"]


AGREED = [trace for trace in ALL if not trace.header.differs]
DIFFERING = [trace for trace in ALL if trace.header.differs]


@pytest.mark.parametrize("trace", AGREED, ids=lambda trace: trace.header.name)
def test_the_reference_repeats_the_trace(trace: Trace) -> None:
    assert first_difference(trace, replayed(trace.header)) == ""


@pytest.mark.parametrize("trace", ALL, ids=lambda trace: trace.header.name)
def test_compat_repeats_what_the_package_does(trace: Trace) -> None:
    assert first_difference(trace, replayed(trace.header, Compat.deepspeed())) == ""


@pytest.mark.parametrize("trace", DIFFERING, ids=lambda trace: trace.header.name)
def test_a_trace_that_we_differ_from_cites_a_known_edge_and_we_do_differ(trace: Trace) -> None:
    edge = trace.header.differs.removeprefix("edge ").split(":")[0]
    assert edge in edge_ids()
    assert first_difference(trace, replayed(trace.header)) != ""


def test_a_growth_step_is_where_the_correct_step_differs_from_deepspeed() -> None:
    trace = next(t for t in ALL if t.header.rule == "wrapper_step")
    said = first_difference(trace, replayed(trace.header))
    assert "step 2 (g), applied: 1.0 was replayed, but 0.5 was recorded" in said


def test_every_situation_is_recorded_and_nothing_else() -> None:
    expected = {
        f"torch_{s.name}" if s.rule == "torch" else f"deepspeed_{s.rule}_{s.name}"
        for s in SITUATIONS
    }
    assert {trace.header.name for trace in ALL} == expected
    assert {path.stem for path in TRACES.iterdir()} == expected


@pytest.mark.parametrize("trace", ALL, ids=lambda trace: trace.header.name)
def test_a_trace_says_where_it_comes_from(trace: Trace) -> None:
    header = trace.header
    assert header.package in ("torch", "deepspeed")
    assert header.version[:1].isdigit()
    assert header.subject.startswith(header.package)
    assert header.command == f"python -m twinstep.golden.record {header.package}"


@pytest.mark.parametrize("situation", TORCH, ids=lambda situation: situation.name)
def test_torchs_scaler_still_does_what_was_recorded(situation: object) -> None:
    again = record_torch.record(next(s for s in TORCH if s is situation))
    old = read(TRACES / f"{again.header.name}.jsonl")
    assert again.steps == old.steps
    assert replace(again.header, version=old.header.version) == old.header


def test_the_replay_names_the_first_step_and_field_that_differ() -> None:
    trace = next(t for t in ALL if t.header.name == "deepspeed_dynamic_window_of_two")
    steps = [dict(step) for step in replayed(trace.header)]
    steps[2]["scale"] = 33.0
    steps[5]["cur_iter"] = 0
    said = first_difference(trace, list(steps))
    assert said == (
        "deepspeed_dynamic_window_of_two, step 2 (g), scale: 33.0 was replayed, "
        "but 32.0 was recorded"
    )
    assert "13 steps were replayed" in first_difference(trace, list(steps[:13]))


def test_a_missing_field_is_a_difference() -> None:
    trace = ALL[0]
    steps = [{k: v for k, v in step.items() if k != "scale"} for step in trace.steps]
    assert "step 0" in first_difference(trace, list(steps))


@pytest.mark.parametrize("trace", ALL, ids=lambda trace: trace.header.name)
def test_traces_are_read_back_as_they_were_written(trace: Trace) -> None:
    text = (TRACES / f"{trace.header.name}.jsonl").read_text()
    assert to_text(trace) == text
    assert from_text(text, "here") == trace


BROKEN = [
    ("nonsense", "here should be JSON lines with a header"),
    ('{"schema": 99}', "here has schema 99, but should have 1"),
    ("[]", "here has schema None"),
    ("", "here should be JSON lines with a header"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=str)
def test_a_file_that_is_no_trace_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(text, "here")


def test_a_trace_that_lost_a_step_is_refused() -> None:
    lines = to_text(ALL[0]).splitlines()
    with pytest.raises(ValueError, match="but its header announces"):
        from_text("\n".join(lines[:-1]), "here")


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="rule='apex', but should be one of dynamic, wrapper"):
        replayed(replace(ALL[0].header, rule="apex"))


def test_the_recorder_writes_what_is_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record.main(["torch", str(tmp_path)]) == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(f"torch_{s.name}.jsonl" for s in TORCH)
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["apex"], ["torch", "a", "b"]], ids=str)
def test_the_recorder_refuses_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert record.main(arguments) == 2
    assert "usage: python -m twinstep.golden.record" in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed here, so that its absence cannot be shown")
    assert record.main(["deepspeed"]) == 2
    assert "deepspeed should be installed to be recorded" in capsys.readouterr().err
