"""Simulated ranks with faults: every other rank raises one clear error, and no thread is left."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.parity.ranks.errors import (
    CollectiveError,
    MismatchedCalls,
    RankLost,
    RanksFailed,
)
from twinstep.parity.ranks.world import Rank, World

MAX = dist.ReduceOp.MAX


class Own(Exception):
    """A rank's own error."""


def raises(rank: Rank, group: Any) -> None:
    raise Own("of its own")


def stalls(rank: Rank, group: Any) -> None:
    rank.stall()


def returns(rank: Rank, group: Any) -> None:
    raise StopIteration


def leaves_out(rank: Rank, group: Any) -> None:
    pass


def maximum(rank: Rank, group: Any) -> None:
    dist.all_reduce(torch.zeros(2), op=MAX, group=group)


def other_dtype(rank: Rank, group: Any) -> None:
    dist.all_reduce(torch.zeros(2, dtype=torch.float16), group=group)


def other_size(rank: Rank, group: Any) -> None:
    dist.all_reduce(torch.zeros(3), group=group)


def other_collective(rank: Rank, group: Any) -> None:
    dist.broadcast(torch.zeros(2), group_src=0, group=group)


def other_root(rank: Rank, group: Any) -> None:
    dist.broadcast(torch.zeros(2), group_src=1, group=group)


ENDS = (raises, stalls, returns, leaves_out)
MISMATCHES = (maximum, other_dtype, other_size, other_collective)


@dataclass(frozen=True)
class Faulty:
    """Sums over groups in turn, of which one rank does something else in the place of one."""

    world: World
    axes: list[str]
    rank: int
    at: int
    fault: Callable[[Rank, Any], None]
    is_async: bool

    def run(self, rank: Rank) -> int:
        """The program of every rank."""
        works = []
        for number, axis in enumerate(self.axes):
            group = rank.group(axis)
            if (rank.number, number) == (self.rank, self.at):
                try:
                    self.fault(rank, group)
                except StopIteration:
                    return number
            else:
                works.append(dist.all_reduce(torch.zeros(2), group=group, async_op=self.is_async))
        for work in works:
            if work is not None:
                work.wait()
        return len(self.axes)


@st.composite
def faulty(draw: st.DrawFn) -> Faulty:
    sizes = {"data": draw(st.integers(2, 3)), "tensor": draw(st.integers(2, 3))}
    axes = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=4))
    return Faulty(
        World(sizes, seed=draw(st.integers(0, 999)), late=draw(st.booleans())),
        axes,
        draw(st.integers(0, sizes["data"] * sizes["tensor"] - 1)),
        draw(st.integers(0, len(axes) - 1)),
        draw(st.sampled_from(ENDS + MISMATCHES)),
        draw(st.booleans()),
    )


@settings(max_examples=150)
@given(program=faulty())
def test_a_fault_of_one_rank_is_an_error_of_the_ranks_that_meet_it_and_never_a_hang(
    program: Faulty,
) -> None:
    threads = threading.active_count()
    with pytest.raises(RanksFailed) as caught:
        program.world.run(program.run)
    assert "has come no further" not in str(caught.value), "they waited for their patience to end"
    assert threading.active_count() == threads
    errors, results = caught.value.errors, caught.value.results
    assert sorted([*errors, *results]) == list(range(program.world.size))
    own = errors.pop(program.rank, None)
    if program.fault is raises:
        assert isinstance(own, Own)
    elif program.fault is stalls:
        assert str(own).startswith(f"rank {program.rank} is stalled")
    assert errors
    for rank, error in errors.items():
        assert isinstance(error, CollectiveError)
        assert error.rank == rank
        assert f"rank {rank}, {error.group}, all_reduce(SUM, float32, 2 elements)]" in str(error)
    if program.fault in MISMATCHES:
        assert any(isinstance(error, MismatchedCalls) for error in errors.values())
    else:
        assert all(isinstance(error, RankLost) for error in errors.values())


def failed(run: Callable[[Rank], object], world: World | int) -> dict[int, str]:
    with pytest.raises(RanksFailed) as caught:
        (World(world) if isinstance(world, int) else world).run(run)
    return {rank: str(error) for rank, error in caught.value.errors.items()}


def test_a_rank_that_stalls_never_goes_on() -> None:
    after: list[int] = []

    def run(rank: Rank) -> None:
        if rank.number == 1:
            rank.stall()
            after.append(rank.number)

    assert list(failed(run, 3)) == [1]
    assert not after


def test_a_rank_that_only_asks_hears_of_a_dead_one() -> None:
    def run(rank: Rank) -> None:
        if rank.number == 1:
            raise Own
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        work.wait()

    for seed in range(4):
        errors = failed(run, World(2, seed=seed, patience=2.0))
        assert errors[0].startswith("rank 1 has raised Own, and does not come")


def test_a_mismatch_names_both_calls_and_the_group() -> None:
    def run(rank: Rank) -> None:
        for fault in (other_collective, other_root)[rank.number :][:1]:
            fault(rank, rank.group("data"))

    says = "rank {} calls broadcast(float32, 2 elements, root {}), but rank {} calls broadcast("
    for error in failed(run, 2).values():
        assert any(error.startswith(says.format(at, at, 1 - at)) for at in (0, 1))
        assert "group data of ranks 0, 1" in error


def test_pieces_that_do_not_fit_each_other_are_a_mismatch() -> None:
    """Rank 1 sends two elements to rank 0, which takes one."""

    def run(rank: Rank) -> None:
        sent = [1, 1] if rank.number == 0 else [2, 1]
        dist.all_to_all_single(torch.zeros(2), torch.zeros(sum(sent)), [1, 1], sent)

    errors = failed(run, 2)
    assert all("rank 0 takes 1 elements in all_to_all_single(" in e for e in errors.values())
    assert all("but is sent 2 [" in e for e in errors.values())


def test_ranks_that_wait_for_each_other_in_another_order_are_told_so() -> None:
    """Both send before they receive; groups the wrong way round."""

    def sends(rank: Rank) -> None:
        dist.send(torch.zeros(1), dst=1 - rank.number)
        dist.recv(torch.zeros(1), src=1 - rank.number)

    def crosses(rank: Rank) -> None:
        groups = [rank.group("a"), rank.group("b")]
        for group in reversed(groups) if rank.number in (1, 2) else groups:
            dist.barrier(group=group)

    errors = failed(sends, 2)
    assert errors[0].startswith("rank 1 waits in point_to_point(float32, 1 elements, root 1) on ")
    errors = failed(crosses, World({"a": 2, "b": 2}))
    assert len(errors) == 4
    assert errors[0].startswith("rank 2 waits in barrier() on group b of ranks 2, 3, and does not")


def test_a_collective_that_is_never_waited_for_does_not_hide_that_others_stayed_away() -> None:
    def run(rank: Rank) -> None:
        if rank.number == 0:
            dist.all_reduce(torch.zeros(1), async_op=True)

    errors = failed(run, 3)
    assert list(errors) == [0]
    assert "rank 1 has returned and rank 2 has returned, and does not come" in errors[0]


@pytest.mark.parametrize("ends", [SystemExit("bye"), KeyboardInterrupt()])
def test_a_rank_that_exits_is_dead(ends: BaseException) -> None:
    def run(rank: Rank) -> None:
        if rank.number == 1:
            raise ends
        dist.barrier()

    errors = failed(run, 2)
    assert errors[0].startswith(f"rank 1 has raised {type(ends).__name__}")


@pytest.mark.parametrize("awake", [True, False], ids=["loops", "sleeps"])
def test_a_rank_that_comes_no_further_is_given_up_after_the_bound(awake: bool) -> None:
    def run(rank: Rank) -> None:
        if rank.number == 1:
            while awake:
                pass
            time.sleep(0.5)
        dist.barrier()

    threads = threading.active_count()
    errors = failed(run, World(3, patience=0.2))
    assert threading.active_count() == threads
    assert errors[0].startswith("rank 1 has come no further for 0.2 s, and does not come [rank 0")
    assert errors[1] == "rank 1 has come no further for 0.2 s [rank 1]"


def test_the_first_error_of_a_ranks_own_is_the_cause() -> None:
    def run(rank: Rank) -> None:
        if rank.number == 2:
            raise Own("the reason")
        dist.barrier()

    with pytest.raises(RanksFailed, match="3 of 3 ranks:\nrank 0: RankLost: rank 2 has") as caught:
        World(3).run(run)
    assert isinstance(caught.value.__cause__, Own)


def test_an_error_in_the_thread_that_runs_the_world_leaves_no_thread() -> None:
    """As Ctrl-C is."""
    threads = threading.active_count()
    world = World(2, patience=20.0)
    main = threading.main_thread()

    def run(rank: Rank) -> None:
        if rank.number == 0:
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT)
            while True:
                time.sleep(0.001)
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        world.run(run)
    assert threading.active_count() == threads
    assert not dist.is_initialized()


def test_a_rank_can_go_on_after_an_error_that_it_expects() -> None:
    def run(rank: Rank) -> str:
        if rank.number == 2:
            return "gone"
        with pytest.raises(RankLost, match="^rank 2 has returned, and does not come"):
            dist.all_reduce(torch.zeros(1))
        with pytest.raises(RankLost):
            dist.all_reduce(torch.zeros(1))
        pair = rank.new_group([0, 1])
        own = torch.ones(1)
        dist.all_reduce(own, group=pair)
        return f"{own.item()}"

    assert World(3, seed=2).run(run) == ["2.0", "2.0", "gone"]


def test_ranks_that_make_other_groups_are_told_so() -> None:
    def run(rank: Rank) -> None:
        dist.barrier(group=rank.new_group([0, 1] if rank.number else [1, 0]))

    errors = failed(run, 2)
    assert errors[0].startswith("rank 1 waits in barrier() on group new group 0 of ranks 0, 1, ")


def test_a_handle_is_for_its_own_ranks_thread() -> None:
    kept: list[Any] = []

    def run(rank: Rank) -> None:
        kept.append(dist.all_reduce(torch.zeros(1), async_op=True))
        dist.barrier()

    World(2).run(run)
    for work in kept:
        if not work.is_success():
            with pytest.raises(RuntimeError, match="^only the thread of rank [01] can wait for"):
                work.wait()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"order": "star"}, "order='star', but should be"), ({"axes": {"a": 0}}, "have a rank along")],
)
def test_a_world_that_makes_no_sense_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        World(**{"axes": 2, **options})


def test_an_axis_that_is_none_is_refused() -> None:
    errors = failed(lambda rank: rank.group("model"), 1)
    assert errors == {0: "no axis ['model'], but data"}
