"""Training shared out over ranks: the run of one process, and an end of all when one is lost."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import lost_ranks
from tests.helpers.waiting import LIMIT_S
from twinstep import scenarios
from twinstep.parity.ranks.world import Rank, World
from twinstep.parity.registry.engines import engine_named
from twinstep.scenarios import calls, train
from twinstep.scenarios.model import Shape
from twinstep.scenarios.optimizers import accumulated
from twinstep.scenarios.plan import Plan
from twinstep.scenarios.processes import RankLost, RankRefused, launch
from twinstep.scenarios.ranks import Ranks
from twinstep.scenarios.trace import Trace, first_difference
from twinstep.scenarios.trainers import ClassTrainer

TINY = Shape(context=8, width=6, layers=1)
KINDS = [
    ("adam", "fp16"),
    ("adam", "bf16"),
    ("adam", "fp32"),
    ("lamb", "fp16"),
    ("lamb", "bf16"),
    ("mixed_step", "fp16"),
]
needs_gloo = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch was built without gloo"
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "engine", lambda **_: engine_named("replay"))


def plan(optimizer: str, dtype: str, accumulate: int, rule: str = "wrapper") -> Plan:
    return Plan(
        optimizer=optimizer,
        dtype=dtype,
        steps=6,
        accumulate=accumulate,
        rule=rule,
        scale_window=2,
        held_out=1,
        shape=TINY,
    )


def ranks_of(rank: Rank) -> Ranks:
    return Ranks(rank.number, dist.get_world_size(), rank.group("data"))


def over(count: int, side: str, asked: Plan, **files: Path | int) -> list[Trace]:
    """The run of every simulated rank."""

    def one(rank: Rank) -> Trace:
        return train.run(side, asked, ranks=ranks_of(rank), **files)  # type: ignore[arg-type]

    with train.one_thread():
        return World(count, seed=count).run(one)


@pytest.mark.parametrize("side", calls.SIDES)
@pytest.mark.parametrize(("optimizer", "dtype"), KINDS)
def test_a_micro_batch_for_each_rank_is_the_run_of_one_process(
    optimizer: str, dtype: str, side: str
) -> None:
    asked = plan(optimizer, dtype, 3)
    alone = train.run("reference", asked)
    for trace in over(3, side, asked):
        assert first_difference(alone, trace) is None
        assert trace.held_out == alone.held_out
        assert trace.header.ranks == 3
    assert bool(alone.skipped) == (dtype == "fp16")


def test_the_operation_adds_in_the_order_of_one_process_on_any_number_of_ranks() -> None:
    asked = plan("mixed_step", "fp16", 4)
    alone = train.run("reference", asked)
    assert [first_difference(alone, trace) for trace in over(2, "reference", asked)] == [None] * 2


def gradients(asked: Plan, ranks: Ranks) -> list[Tensor]:
    """Sums over the micro-batches of the first step, in fp64."""
    trainer = ClassTrainer(asked, "reference", calls.CPU, ranks)
    for windows in trainer.micro_batches():
        trainer.wrapper.backward(trainer.loss(trainer.weights, windows) / asked.accumulate)
    own = accumulated(trainer.optimizer, trainer.weights)
    ranks.add_(own)
    return [tensor.detach().double() for tensor in own]


@pytest.mark.parametrize(
    ("optimizer", "dtype", "unit"),
    [("adam", "fp16", 2.0**-11), ("adam", "bf16", 2.0**-24), ("lamb", "bf16", 2.0**-8)],
)
def test_several_micro_batches_for_each_rank_are_within_the_bound_of_a_sum_in_any_order(
    optimizer: str, dtype: str, unit: float
) -> None:
    """With n addends and g = (n - 1) u / (1 - (n - 1) u), each sum is within g * sum |a_i|."""
    asked = plan(optimizer, dtype, 4, rule="static")
    with train.one_thread():
        alone = gradients(asked, Ranks())
        addends = World(4).run(lambda rank: gradients_of_one(asked, rank))
        found = World(2).run(lambda rank: gradients(asked, ranks_of(rank)))
    bound = 2 * 3 * unit / (1 - 3 * unit)
    assert any(not torch.equal(a, b) for a, b in zip(alone, found[0], strict=True)) or unit < 1e-6
    for mine in found:
        for place, (one, other) in enumerate(zip(alone, mine, strict=True)):
            size = sum((row[place].abs() for row in addends), torch.zeros_like(one))
            assert bool(((one - other).abs() <= bound * size).all())


def gradients_of_one(asked: Plan, rank: Rank) -> list[Tensor]:
    """Gradients of one micro-batch among all."""
    alone = Ranks(rank.number, asked.accumulate, rank.group())  # whole masters
    trainer = ClassTrainer(asked, "reference", calls.CPU, alone)
    (windows,) = trainer.micro_batches()
    trainer.wrapper.backward(trainer.loss(trainer.weights, windows) / asked.accumulate)
    return [t.detach().double() for t in accumulated(trainer.optimizer, trainer.weights)]


@pytest.mark.parametrize(("optimizer", "dtype"), [("adam", "fp16"), ("adam", "bf16")])
def test_a_run_goes_on_with_another_number_of_ranks(
    optimizer: str, dtype: str, tmp_path: Path
) -> None:
    asked, saved = plan(optimizer, dtype, 2), tmp_path / "run.pt"
    whole = train.run("reference", asked)
    over(2, "fast", asked, stop=2, save=saved)
    train.run("reference", asked, resume=saved, stop=4, save=saved)
    for ended in over(2, "reference", asked, resume=saved):
        assert first_difference(whole, ended) is None


def test_ranks_that_do_not_divide_the_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks=2, but should divide the 3 micro-batches"):
        train.run("reference", plan("adam", "fp32", 3), ranks=Ranks(0, 2))


LOSSES: dict[Callable[[Ranks], None], tuple[type[Exception], str]] = {
    lost_ranks.is_killed: (RankLost, "rank 1 was ended by SIGKILL, and the others were stopped"),
    lost_ranks.is_stopped: (RankLost, r"rank [02]: another rank does not answer: Timed out"),
    lost_ranks.refuses: (RankRefused, "its file is not there"),
    lost_ranks.fails: (RankLost, "rank 1 has failed with the error above"),
    lost_ranks.ends_early: (RankLost, r"rank [02]: another rank does not answer: .*[Cc]onnection"),
}


@needs_gloo
@pytest.mark.parametrize("train_rank", LOSSES, ids=lambda function: function.__name__)
def test_a_rank_that_is_lost_ends_all_in_one_sentence(
    train_rank: Callable[[Ranks], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, sentence = LOSSES[train_rank]
    before = set(multiprocessing.active_children())
    with pytest.raises(kind, match=sentence) as caught:
        launch(3, "reference", LIMIT_S, train_rank)
    assert len(str(caught.value).splitlines()) == 1
    assert set(multiprocessing.active_children()) == before
    assert ("KeyError: 'a defect'" in capsys.readouterr().err) == (train_rank is lost_ranks.fails)


@needs_gloo
def test_ranks_that_all_do_their_part_end_well() -> None:
    launch(3, "reference", LIMIT_S, lost_ranks.add_up)


@needs_gloo
def test_a_port_that_is_taken_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        assert scenarios.main(["train", "--steps", "1", "--timeout", "5"]) == 2
        assert scenarios.main(["train", "--steps", "1", "--ranks", "3"]) == 2
    met, asked = capsys.readouterr().err.splitlines()
    assert met.startswith("scenarios train: the ranks cannot meet: ")
    assert "EADDRINUSE" in met
    assert asked == "scenarios train: ranks=3, but torchrun has started 2 [--ranks]"
