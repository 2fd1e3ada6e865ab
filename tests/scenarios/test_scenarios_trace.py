"""Traces keep every bit, refuse what is not one, and notice the smallest difference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twinstep.scenarios.calls import State
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.trace import StepRecord, Trace, digest, first_difference, read, write
from twinstep.scenarios.trainers import OperationTrainer

PARAMS = [torch.tensor([0.0, 1.0]), torch.tensor([2.0])]


def state() -> State:
    return State.initial(PARAMS, Plan())


def example() -> Trace:
    header = OperationTrainer(Plan(steps=2)).header("reference")
    first = StepRecord(
        step=1, loss=0.1, lr=1e-3, scale=2.0**20, norm=math.inf, skipped=True, state="a"
    )
    second = replace(first, step=2, loss=math.nextafter(0.1, 1.0), norm=3.3, skipped=False)
    return Trace(header=header, records=[first, second], held_out=(5.5, 0.1))


def test_trace_read_back_is_the_same_trace(tmp_path: Path) -> None:
    write([example()], tmp_path / "t.jsonl")
    assert read(tmp_path / "t.jsonl") == [example()]


def test_a_file_holds_one_run_after_the_other(tmp_path: Path) -> None:
    runs = [example(), replace(example(), held_out=(5.5, math.inf))]
    write(runs, tmp_path / "t.jsonl")
    assert read(tmp_path / "t.jsonl") == runs


def test_trace_file_is_one_line_per_step_with_floats_in_hexadecimal(tmp_path: Path) -> None:
    write([example()], tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert '"loss": "0x1.999999999999ap-4"' in lines[1]
    assert '"norm": "inf"' in lines[1]


def test_trace_knows_its_skipped_steps() -> None:
    assert example().skipped == [1]


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_trace_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    write([example()], tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "t.jsonl").write_text("".join(lines[:kept]))
    with pytest.raises(ValueError, match="is no complete trace of schema 2"):
        read(tmp_path / "t.jsonl")


def test_a_trace_of_another_schema_is_refused(tmp_path: Path) -> None:
    write([replace(example(), header=replace(example().header, schema=3))], tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="schema=3, but should be 2"):
        read(tmp_path / "t.jsonl")


def test_equal_traces_have_no_first_difference() -> None:
    nan = replace(example().records[0], norm=math.nan)
    trace = replace(example(), records=[nan])
    assert first_difference(trace, replace(example(), records=[nan])) is None


def test_first_difference_names_step_and_field_of_one_ulp() -> None:
    other = example()
    records = [other.records[0], replace(other.records[1], loss=0.1)]
    found = first_difference(other, replace(other, records=records))
    assert found == "step 2 loss: 0x1.999999999999bp-4 and 0x1.999999999999ap-4"


def test_first_difference_notices_a_missing_step() -> None:
    shorter = replace(example(), records=example().records[:1])
    assert first_difference(example(), shorter) == "2 steps and 1 steps"


def test_digest_counts_the_sign_of_zero() -> None:
    ours, theirs = state(), state()
    assert digest(ours.entries) == digest(theirs.entries)
    theirs.params[0][0] = -0.0
    assert digest(ours.entries) != digest(theirs.entries)


@pytest.mark.parametrize("name", list(state().entries))
def test_digest_covers_every_entry(name: str) -> None:
    changed = state()
    value = changed.entries[name]
    (value[-1] if isinstance(value, list) else value).add_(1)
    assert digest(changed.entries) != digest(state().entries)


def test_digest_takes_every_nan_norm_for_one() -> None:
    ours, theirs = state(), state()
    ours.norm.view(torch.int32).fill_(0x7FC00000)
    theirs.norm.view(torch.int32).fill_(-1)
    assert digest(ours.entries) == digest(theirs.entries)
    theirs.norm.fill_(math.inf)
    assert digest(ours.entries) != digest(theirs.entries)
