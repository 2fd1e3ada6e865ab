"""Rows of whole classes: ours beside others, parameters as FSDP2 has them, timers of a peer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from twinstep.benchmarks.beside import classes, measure
from twinstep.benchmarks.beside.measure import measured
from twinstep.benchmarks.beside.rows import AGAIN, PART
from twinstep.contract.timers import PhaseTimers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Rows of DTensors make a process group; a process that times them ends with it."""
    yield
    classes.mesh.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", classes.BYTES)
def test_every_class_steps_beside_torchs_and_what_is_absent_has_a_reason(dtype: str) -> None:
    found = measured([], ("step", dtype, 3, 40), 2)
    names = [row["name"] for row in found["rows"]]
    ours, others = classes.steps_of(dtype, CPU)
    assert {step.name for step in ours} | {ours[0].name + AGAIN} <= set(names)
    for step in others:
        assert step.package != "torch" or step.name in names
        assert step.name in names or found["absent"][step.name]
    assert all(len(row["seconds"]) == 2 for row in found["rows"])
    assert found["bytes"] == sum(classes.BYTES[dtype]) * 120


def test_parameters_are_dtensors_where_they_should_be() -> None:
    from torch.distributed.tensor import DTensor

    (tensor,) = classes.distributed([torch.ones(4)], CPU)
    assert isinstance(tensor, DTensor)
    assert torch.equal(tensor.to_local(), torch.ones(4))


def test_a_step_with_timers_gives_the_time_of_its_last_phases() -> None:
    timers = PhaseTimers(CPU)
    clock = iter([1.0, 3.0, 10.0, 11.0])

    def step() -> None:
        timer = timers("basic_step")
        timer.total += 1e3 * (-next(clock) + next(clock))

    timed = classes.TimedStep(step, timers)
    for seconds in (2.0, 1.0):
        timed()
        parts = timed.parts()
        assert parts.pop(f"{classes.FLAT}: basic_step") == pytest.approx(seconds)
        assert set(parts.values()) == {0.0}


def test_parts_stand_beside_the_row_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "version_of", lambda _: "0")

    def flat(_: object) -> classes.TimedStep:
        return classes.TimedStep(lambda: None, PhaseTimers(CPU))

    monkeypatch.setattr(classes, "deepspeed_fp16", flat)
    found = measured([], ("step", "fp16", 2, 8), 3)
    parts = [row for row in found["rows"] if row["family"] == PART]
    assert [row["name"].partition(": ")[2] for row in parts] == list(classes.TIMERS)
    assert {len(row["seconds"]) for row in parts} == {3}


def test_rounds_go_on_until_ratios_are_known() -> None:
    assert measure.known([1.0, 1.01] * 3, [1.0] * 6)
    assert not measure.known([1.0, 1.1] * 3, [1.0] * 6)
    # One turn of nine may be far off on each side, and no more.
    assert measure.known([0.5, *[1.0] * 7, 3.0], [1.0] * 9)
    assert not measure.known([0.5, 0.5, *[1.0] * 6, 3.0], [1.0] * 9)
