"""Recorded behaviour: both sides repeat every trace, and a changed digit is noticed."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace

import pytest
import torch

from twinstep.golden import manifest
from twinstep.golden.record import ALL as SITUATIONS
from twinstep.golden.record import name_of
from twinstep.golden.trace import TRACES, Trace, from_text, read_all, to_text
from twinstep.parity.proof.golden.replay import (
    allowed_distances,
    first_difference,
    is_rounded,
    replayed,
)
from twinstep.parity.proof.golden.verify import faults_of
from twinstep.parity.proof.upstream.edges import edge_ids

ALL = read_all()
ENTRIES = manifest.read()
EACH = pytest.mark.parametrize("trace", ALL, ids=lambda trace: trace.header.name)
ROUNDED = [trace for trace in ALL if is_rounded(trace.header, "fast")]
DIFFERING = [trace for trace in ALL if trace.header.differs]
DS = "Compat.deepspeed()"


@EACH
def test_the_reference_repeats_the_trace(trace: Trace) -> None:
    assert faults_of(trace, ENTRIES[trace.header.name], ["reference"]) == []


@EACH
@pytest.mark.usefixtures("replay")
def test_the_fast_side_repeats_the_trace_in_its_whole_steps(trace: Trace) -> None:
    ways = ["stepped", "fast"] if is_rounded(trace.header, "fast") else ["fast"]
    # Our own traces are of our default.
    compat = "default" if trace.header.package == "twinstep" else DS
    assert faults_of(trace, ENTRIES[trace.header.name], ways, [compat]) == []


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("trace", DIFFERING[::4], ids=lambda trace: trace.header.name)
def test_our_default_differs_on_the_fast_side_where_the_trace_says_so(trace: Trace) -> None:
    entry = ENTRIES[trace.header.name]
    assert faults_of(trace, entry, ["fast"], ["default"]) == []
    assert entry.differs_in


@pytest.mark.parametrize("trace", DIFFERING, ids=lambda trace: trace.header.name)
def test_a_trace_that_we_differ_from_cites_a_known_edge(trace: Trace) -> None:
    edge = trace.header.differs.removeprefix("edge ").split(":")[0]
    assert edge in edge_ids()


def test_a_growth_step_is_where_the_correct_step_differs_from_deepspeed() -> None:
    trace = next(t for t in ALL if t.header.rule == "wrapper_step")
    said = first_difference(trace, replayed(trace.header))
    assert "step 2 (g), applied: 1.0 was replayed, but 0.5 was recorded" in said


def test_every_situation_is_recorded_and_nothing_else() -> None:
    expected = {name_of(situation) for situation in SITUATIONS}
    assert {trace.header.name for trace in ALL} == expected == set(ENTRIES)
    assert {path.stem for path in TRACES.iterdir()} == expected | {"manifest"}


def test_there_are_at_least_sixty_and_no_path_is_missing() -> None:
    # A trace that the fast side cannot replay has the reason in the manifest; there is none.
    assert sum(bool(entry.untaken) for entry in ENTRIES.values()) == 0
    packages = Counter(entry.package for entry in ENTRIES.values())
    assert packages == {"deepspeed": 90, "torch": 18, "twinstep": 6}
    upstream = [name for name in ENTRIES if "_upstream_" in name]
    assert len(upstream) == 20


@EACH
def test_a_trace_says_where_it_comes_from(trace: Trace) -> None:
    header = trace.header
    assert header.package in ("torch", "deepspeed", "twinstep")
    assert header.version[:1].isdigit()
    assert header.subject.startswith(header.package)
    own = header.package == "twinstep"
    program = "parity golden record" if own else "python -m twinstep.golden.record"
    assert header.command == f"{program} {header.package}"


def test_weights_of_another_arithmetic_may_differ_by_roundings_and_no_more() -> None:
    for trace in ROUNDED:
        allowed = allowed_distances(trace)
        assert max(allowed) < 3e-5
        steps = [dict(step) for step in trace.steps]
        held = steps[-1]["weights"]
        assert isinstance(held, tuple)
        steps[-1]["weights"] = (held[0] + 1.01 * allowed[-1], *held[1:])
        assert "weights[0]" in first_difference(trace, list(steps), rounded=True)
        steps[-1]["weights"] = (held[0] + 0.9 * allowed[-1], *held[1:])
        assert first_difference(trace, list(steps), rounded=True) == ""


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
    steps = [{k: v for k, v in step.items() if k != "norm"} for step in trace.steps]
    assert "step 0" in first_difference(trace, list(steps))


@EACH
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


def test_a_package_that_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from twinstep.golden import record

    if importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed here, so that its absence cannot be shown")
    assert record.main(["deepspeed"]) == 2
    assert "deepspeed should be installed to be recorded" in capsys.readouterr().err


def test_the_traces_of_torch_were_made_by_a_torch_that_we_support() -> None:
    versions = {entry.version for entry in ENTRIES.values() if entry.package == "torch"}
    assert all(version.split(".")[0] == torch.__version__.split(".")[0] for version in versions)
