"""Simulated ranks: groups, counts, what is in flight, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinstep.parity.ranks.errors import BufferTouched, RanksFailed, Refused
from twinstep.parity.ranks.group import Collectives, Sent, SimulatedGroup
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

AXES = {"pipeline": 2, "data": 3, "tensor": 2}


def test_groups_are_those_of_the_axes() -> None:
    def run(rank: Rank) -> list[list[int]]:
        names = [("pipeline",), ("data",), ("tensor",), ("pipeline", "tensor"), ()]
        return [dist.get_process_group_ranks(rank.group(*each)) for each in names]

    found = World(AXES).run(run)
    assert found[0] == [[0, 6], [0, 2, 4], [0, 1], [0, 1, 6, 7], [0]]
    assert found[9] == [[3, 9], [7, 9, 11], [8, 9], [2, 3, 8, 9], [9]]


@settings(max_examples=25)
@given(sizes=st.tuples(*[st.integers(1, 2)] * 2, st.integers(1, 3)), seed=st.integers(0, 99))
def test_a_sum_over_each_axis_in_turn_is_the_sum_over_the_world(
    sizes: tuple[int, int, int], seed: int
) -> None:
    axes = dict(zip(AXES, sizes, strict=True))

    def run(rank: Rank) -> tuple[float, float, dict[str, int], int]:
        one, by_one = torch.tensor(float(2**rank.number)), torch.tensor(float(2**rank.number))
        dist.all_reduce(one)
        for axis in axes:
            dist.all_reduce(by_one, group=rank.group(axis))
        return one.item(), by_one.item(), rank.place, dist.get_rank()

    found = World(axes, seed=seed, order="tree").run(run)
    total = float(2 ** len(found) - 1)
    assert [row[:2] for row in found] == [(total, total)] * len(found)
    assert [row[3] for row in found] == list(range(len(found)))
    places = [tuple(row[2].values()) for row in found]
    assert sorted(set(places)) == places


def test_a_new_group_is_known_to_torch() -> None:
    def run(rank: Rank) -> object:
        group = rank.new_group([2, 0])
        if group is None:
            return None
        own = torch.tensor([rank.number])
        dist.broadcast(own, src=2, group=group)
        facts = dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)
        return *facts, own.item()

    assert World(3).run(run) == [(1, 2, "simulated", 2), None, (0, 2, "simulated", 2)]


def test_groups_are_made_and_destroyed_as_torch_does() -> None:
    def run(rank: Rank) -> object:
        pair = dist.new_group([0, 2])
        mesh = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        own = torch.ones(1)
        if rank.number != 1:
            dist.all_reduce(own, group=pair)
        for group in mesh:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(own, group=group)
        dist.destroy_process_group(pair if rank.number != 1 else mesh[0])
        dist.destroy_process_group()
        return own.item(), dist.is_initialized()

    for seed in range(3):
        assert World(3, seed=seed).run(run) == [(3.0, False), (5.0, False), (5.0, False)]


def test_what_holds_by_context_holds_for_ranks() -> None:
    """A list that a block records into, as replay does; what a rank sets is its own."""
    log: ContextVar[list[int]] = ContextVar("log")
    token = log.set([])

    def run(rank: Rank) -> None:
        log.get().append(rank.number)
        log.set([])

    World(3).run(run)
    assert sorted(log.get()) == [0, 1, 2]
    log.reset(token)


def test_torch_knows_of_groups_in_the_threads_of_ranks_alone() -> None:
    def run(rank: Rank) -> object:
        return dist.is_initialized(), dist.get_world_size()

    here = dist.distributed_c10d._world
    seen: list[object] = []
    other = threading.Thread(target=lambda: seen.append(World(3).run(run)))
    other.start()
    assert World(2).run(run) == [(True, 2)] * 2
    other.join()
    assert seen == [[(True, 3)] * 3]
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world is here


def test_calls_and_bytes_are_counted_by_group_and_collective() -> None:
    """Bytes that a rank hands in: of a root that sends to all, the root's alone."""

    def run(rank: Rank) -> tuple[dict[tuple[str, str], tuple[int, int]], list[Sent]]:
        data, tensor = rank.group("data"), rank.group("tensor")
        for _ in range(2):
            dist.all_reduce(torch.zeros(5), group=data)
        dist.broadcast(torch.zeros(3, dtype=torch.float16), group_src=0, group=tensor)
        dist.all_gather([torch.zeros(2) for _ in range(2)], torch.zeros(2), group=tensor)
        dist.barrier(group=data)
        return rank.traffic(), rank.sent

    for number, (traffic, sent) in enumerate(World({"data": 2, "tensor": 2}).run(run)):
        assert traffic == {
            ("data", "all_reduce"): (2, 40),
            ("tensor", "broadcast"): (1, 0 if number % 2 else 6),
            ("tensor", "all_gather"): (1, 8),
            ("data", "barrier"): (1, 0),
        }
        assert sent[0] == Sent("data", "all_reduce", 5, torch.float32, 20)


def test_an_async_collective_is_poisoned_until_it_is_waited_for() -> None:
    def run(rank: Rank) -> list[bool]:
        whole, part = torch.zeros(3), torch.zeros(3, dtype=torch.int32)
        works = [dist.all_reduce(x, async_op=True) for x in (whole, part)]
        early = bool(whole.isnan().all()) and bool((part == -0x5A5A5A5B).all())
        for work in works:
            assert work is not None
            work.wait()
        return [early, not whole.any() and not part.any()]

    assert World(3, seed=1).run(run) == [[True, True]] * 3


def test_a_rank_keeps_its_own_part_of_a_gather_in_place() -> None:
    def run(rank: Rank) -> list[float]:
        whole = torch.zeros(2, 2)
        whole[rank.number] = rank.number + 1.0
        work = dist.all_gather_into_tensor(whole, whole[rank.number], async_op=True)
        assert whole[rank.number].tolist() == [rank.number + 1.0] * 2
        assert bool(whole[1 - rank.number].isnan().all())
        assert work is not None
        work.wait()
        return whole.flatten().tolist()

    assert World(2).run(run) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_collectives_complete_late_and_out_of_order_as_the_seed_has_it() -> None:
    def run(rank: Rank) -> tuple[bool, ...]:
        tensors = [torch.ones(2) for _ in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.barrier()
        done = tuple(not bool(tensor.isnan().any()) for tensor in tensors)
        for work in works:
            assert work is not None
            work.wait()
        assert all(tensor.tolist() == [2.0, 2.0] for tensor in tensors)
        return done

    found = [World(2, seed=seed).run(run) for seed in range(30)]
    assert found == [World(2, seed=seed).run(run) for seed in range(30)]
    assert {(True, False, False), (False, False, True), (False, True, False)} < {
        row for ranks in found for row in ranks
    }
    assert World(2, late=False).run(run) == [(False,) * 3] * 2


@pytest.mark.parametrize("changed", ["input", "output"])
def test_what_is_written_in_flight_is_an_error(changed: str) -> None:
    def run(rank: Rank) -> None:
        own, out = torch.ones(2), torch.empty(4)
        work = dist.all_gather_into_tensor(out, own, async_op=True)
        if rank.number == 1:
            (own if changed == "input" else out).zero_()
        assert work is not None
        work.wait()

    with pytest.raises(RanksFailed) as caught:
        World(2, late=False).run(run)
    (error,) = caught.value.errors.values()
    assert isinstance(error, BufferTouched)
    assert f"an {changed} was written while the collective was in flight [rank 1, " in str(error)


def test_hooks_of_backward_start_collectives_that_are_waited_for_later() -> None:
    def run(rank: Rank) -> list[float]:
        assert not torch._C._is_multithreading_enabled()  # hooks run in the rank's own thread
        params = [torch.nn.Parameter(torch.full((2,), float(at))) for at in range(3)]
        works: list[Any] = []

        def reduce_now(param: Tensor) -> None:
            works.append(dist.all_reduce(param.grad, async_op=True))

        for param in params:
            param.register_post_accumulate_grad_hook(reduce_now)
        squares = [(param * param * (rank.number + 1)).sum() for param in params]
        torch.stack(squares).sum().backward()
        for work in reversed(works):
            work.wait()
        return [x for param in params if param.grad is not None for x in param.grad.tolist()]

    assert World(3, seed=4).run(run) == [[0.0, 0.0, 12.0, 12.0, 24.0, 24.0]] * 3


def test_a_loop_that_asks_whether_it_is_completed_ends() -> None:
    def run(rank: Rank) -> float:
        own = torch.ones(())
        work = dist.all_reduce(own, async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        return own.item()

    assert World(4).run(run) == [4.0] * 4


def strided(group: Any) -> object:
    return dist.all_reduce(torch.zeros(4)[::2], group=group)


def bits_of_a_float(group: Any) -> object:
    return dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.BOR, group=group)


def uneven(group: Any) -> object:
    return dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(5), group=group)


def outputs_of_one_memory(group: Any) -> object:
    return dist.all_gather([torch.zeros(2)] * 2, torch.zeros(2), group=group)


def a_smaller_output(group: Any) -> object:
    return dist.all_gather([torch.zeros(1), torch.zeros(2)], torch.zeros(2), group=group)


def any_source(group: Any) -> object:
    return dist.recv(torch.zeros(1), group=group)


def a_callback(group: Any) -> object:
    work: Any = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    return work.get_future().then(print)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (strided, "a tensor is not contiguous, but groups send contiguous memory only"),
        (bits_of_a_float, "ReduceOp.BOR is for integers, but the tensor is torch.float32"),
        (uneven, r"splits 5 elements over 2 ranks into \[2, 2\]"),
        (outputs_of_one_memory, "two outputs lie in the same memory"),
        (a_smaller_output, r"has tensors of \(1, 2\) elements, but should have \(2, 2\)"),
        (any_source, "the call is not simulated"),
        (a_callback, "PendingFuture.then is not simulated"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_a_sentence(
    call: Callable[[Any], object], sentence: str
) -> None:
    def run(rank: Rank) -> None:
        group = rank.group("data")
        with pytest.raises(Refused, match=rf"^{sentence} \[rank {rank.number}, group data of"):
            call(group)

    World(2).run(run)


def test_no_method_of_a_process_group_is_left_to_the_base_class() -> None:
    """A collective that a later torch adds would otherwise look for a backend, or do nothing."""
    harmless = {
        "BackendType", "_backend_id", "_device_types", "_enable_collectives_timing",
        "_get_backend", "_get_backend_name", "_get_sequence_number_for_group", "_has_hooks", "_id",
        "_pybind11_conduit_v1_", "_register_backend", "_register_on_completion_hook",
        "_set_default_backend", "_set_group_desc", "_set_group_name",
        "_set_sequence_number_for_group", "_wait_for_pending_works", "abort", "bound_device_id",
        "boxed", "get_group_store", "group_desc", "name", "rank", "set_timeout", "size", "unbox",
        "use_pg_for_symm_mem_rendezvous", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED",
        "XCCL",
    }  # fmt: skip
    base = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    ours = {*vars(SimulatedGroup), *vars(Collectives)}
    assert not base - ours - harmless


def test_torch_2_11_finds_its_names() -> None:
    pairs = {
        "_allgather_base": "all_gather_single",
        "_reduce_scatter_base": "reduce_scatter_single",
        "alltoall_base": "all_to_all_single",
        "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    }
    for old, new in pairs.items():
        assert getattr(Collectives, old) is getattr(Collectives, new)
