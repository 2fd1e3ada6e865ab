"""Threads of a row, builds of a peer, memory that a group needs, and what others take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from twinstep.benchmarks.bench import registered
from twinstep.benchmarks.beside import builds, rows, subject
from twinstep.benchmarks.beside.measure import turns
from twinstep.benchmarks.beside.rows import ALONE, PEER, Group, Timed, kin, tried
from twinstep.benchmarks.beside.statistics import of_process
from twinstep.benchmarks.beside.subject import Shape, Subject
from twinstep.benchmarks.runs import machine

CPU = torch.device("cpu")


@pytest.mark.parametrize(("best", "each", "chosen"), [(1, 64, 1), (2, 64, 2), (1, ALONE, 2)])
def test_a_row_of_small_tensors_keeps_the_threads_that_were_faster(
    best: int, each: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rows, subject):
        monkeypatch.setattr(module, "usual_threads", lambda: 2)
    now, before = [0.0], torch.get_num_threads()

    def call() -> None:
        now[0] += 0.2 if torch.get_num_threads() == best else 0.3

    choices = tried(Group("norm", "fp32", Shape(3, each)), "mine", CPU)
    row = Subject(call, bool, CPU, clock=lambda: now[0], choices=choices)
    try:
        row.settle()
        assert row.threads == chosen
        torch.set_num_threads(3 - chosen)  # as another row left it
        assert row.turn() == pytest.approx(0.2 if chosen == best else 0.3)
    finally:
        torch.set_num_threads(before)


def test_of_many_tensors_a_row_takes_the_threads_that_were_best_for_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {kin(Group("norm", "fp32", Shape(rows.MANY, 64)), "mine"): 2}
    monkeypatch.setattr(rows, "best_threads", lambda: known)
    monkeypatch.setattr(rows, "usual_threads", lambda: 4)
    assert tried(Group("norm", "fp32", Shape(10 * rows.MANY, 64)), "mine", CPU) == (2,)
    for other in (Shape(1000, 64), Shape(10 * rows.MANY, 32)):
        assert tried(Group("norm", "fp32", other), "mine", CPU) == (1, 4)
    assert tried(Group("norm", "fp32", Shape(10 * rows.MANY, 64)), "theirs", CPU) == (1, 4)


def test_a_row_of_long_calls_takes_one_turn_and_is_set_beside_the_first() -> None:
    ready = []
    for name, seconds in (("mine", 2.0), ("long", 5.0), ("short", 0.5)):
        now = [0.0]
        call = partial(lambda now, by: now.append(now.pop() + by), now, seconds)
        row = Subject(call, bool, CPU, clock=partial(lambda now: now[0], now), seconds=seconds)
        ready.append(Timed(name, PEER, row))
    found = {name: times for (name, _, _), times in turns(ready, 4).items()}
    assert found == {"mine": [2.0] * 4, "long": [5.0], "short": [0.5] * 4}
    assert of_process(found["long"], found["mine"]) == 2.5


def test_a_build_that_was_cut_off_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "deepspeed" / builds.NAME / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    loaded: list[bool] = []

    class Builder:
        """DeepSpeed's, which waits while there is a lock."""

        def load(self, verbose: bool) -> None:
            assert not lock.exists()
            loaded.append(verbose)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    monkeypatch.setattr(builds, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(builds, "deepspeed", lambda _: SimpleNamespace(CPUAdamBuilder=Builder))
    builds.build.__wrapped__()
    assert loaded == [False]


def test_memory_is_that_of_the_operations_tensors() -> None:
    kernels, shape = registered(""), Shape(1, 10**9)
    norm = machine.needed(kernels, Group("global_norm", "bf16", shape))
    adam = machine.needed(kernels, Group("adamw_step", "fp32", shape))
    # Two bytes of a gradient; four tensors of four; as many again for what they held at first.
    assert norm % (2 * 10**9) == 0
    assert adam > 32 * 10**9 > norm > 6 * 10**9


def test_time_of_others_is_what_was_used_and_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    now, used = [0.0], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(machine, "own", lambda: used[0])
    stat.write_text("cpu  100 0 0 5000 0 0 0 0 0 0\n")
    others = machine.Others()
    stat.write_text("cpu  1000 50 50 9000 70 0 0 100 0 0\n")  # 11 s used, of 20
    now[0], used[0] = 10.0, 6.0
    assert others.share() == 0.25
    stat.unlink()
    assert machine.Others().share() is None
