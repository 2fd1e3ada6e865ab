"""Messages of the fast ZeroOptimizer: calls and bytes are those of theory, and go out early."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.zero_built import BRAIN, SIDE, built
from twinstep.parity.ranks.group import Sent
from twinstep.parity.ranks.world import Rank, World

pytestmark = pytest.mark.usefixtures("replay", "on_this_side")
SIZES = (4, 8, 19, 1)  # 32 elements: no padding on 1, 2, 4 or 8 ranks
SINGLE = {"all_gather_single": "all_gather_into_tensor"}  # torch 2.13 has renamed it
FACTS = 256  # bytes of a step's facts


@pytest.fixture
def on_this_side() -> Iterator[None]:
    token = SIDE.set("fast")
    yield
    SIDE.reset(token)


def sent(world: int, micros: int, **options: Any) -> list[list[Sent]]:
    """Collectives of each rank in one step."""

    def run(rank: Rank) -> list[Sent]:
        given: dict[str, Any] = {"dtype": BRAIN, "inside": "FusedAdam", **options}
        params, optimizer = built(rank.group("data"), SIZES, **given)
        rank.sent.clear()
        for micro in range(micros):
            loss = torch.stack([(p.float() * (micro + 1.0)).sum() for p in params]).sum()
            optimizer.backward(loss)
        optimizer.step()
        return list(rank.sent)

    return World(world).run(run)


def volume(calls: list[list[Sent]], names: tuple[str, ...]) -> float:
    """Bytes that the average rank sends in these collectives, as few as an algorithm can do with.

    Of a reduction each rank keeps, or one root keeps, what is not sent; a gather sends its input
    to all others; an all-reduce is a reduction and a gather.
    """
    world = len(calls)
    shares = {
        "reduce": (world - 1) / world,
        "reduce_scatter_tensor": (world - 1) / world,
        "all_gather_into_tensor": world - 1,
        "all_reduce": 2 * (world - 1) / world,
    }
    every = [call for own in calls for call in own]
    named = [(SINGLE.get(call.collective, call.collective), call.bytes) for call in every]
    return sum(size * shares[name] for name, size in named if name in names) / world


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce_bucket_size": 10},
        {"reduce_bucket_size": 1, "overlap_comm": True},
        {"contiguous_gradients": False},
        {"round_robin_gradients": True, "reduce_bucket_size": 9},
        {"allgather_bucket_size": 8},
        {"use_multi_rank_bucket_allreduce": False},
    ],
)
def test_a_step_sends_as_many_bytes_as_theory_has(
    options: dict[str, Any], world: int, micros: int
) -> None:
    """Stage 2: (2 k + 2) (W - 1) / W bytes for each bf16 element; stage 1: 4 (W - 1) / W."""
    share = (world - 1) / world
    for stage2, factor in ((True, 2 * micros + 2), (False, 4)):
        calls = sent(world, micros, partition_grads=stage2, **options)
        assert calls == [calls[0]] * world
        moved = ("reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
        assert volume(calls, moved) == factor * share * sum(SIZES)
        facts = [call.bytes for call in calls[0] if call.collective == "all_reduce"]
        assert facts == [FACTS]


def test_without_reduce_scatter_gradients_take_twice_as_many_bytes() -> None:
    calls = sent(4, 2, reduce_scatter=False)
    gradients = [
        [c for c in own if c.dtype == BRAIN and c.collective == "all_reduce"] for own in calls
    ]
    assert volume(gradients, ("all_reduce",)) == 2 * (2 * 2) * 3 / 4 * sum(SIZES)
    assert [len(own) for own in gradients] == [2] * 4


def test_gradients_of_bf16_are_sent_in_fp32_on_request() -> None:
    calls = sent(2, 1, communication_data_type=torch.float32)
    assert [c.bytes for c in calls[0] if c.collective == "reduce_scatter_tensor"] == [4 * 32]


def test_buckets_are_reduced_to_their_owners_last_ones_first() -> None:
    """Four parameters over four ranks of 8 elements each, in buckets of at most 10."""
    calls = sent(4, 1, reduce_bucket_size=10)
    reduced = [call.elements for call in calls[0] if call.collective == "reduce"]
    # [31, 32); [12, 31) by itself, over three ranks; [4, 12); [0, 4).
    assert reduced == [1, 4, 8, 7, 4, 4, 4]


def test_buckets_of_all_groups_follow_the_order_of_the_model() -> None:
    """Otherwise one group's would wait until backward has come to the first layer of the other."""
    calls = sent(2, 1, split=1)
    scattered = [c.elements for c in calls[0] if c.collective == "reduce_scatter_tensor"]
    assert scattered == [28, 4]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("unused", [None, 0, 1])
def test_buckets_leave_while_backward_runs(overlaps: bool, unused: int | None) -> None:
    """Even on a rank that lacks a gradient of what comes later, which is sent as zeros."""

    def run(rank: Rank) -> list[int]:
        options: dict[str, Any] = {"reduce_bucket_size": 4, "overlap_comm": overlaps}
        params, optimizer = built(rank.group("data"), (4, 4, 4), **options)
        seen: list[int] = []
        rank.sent.clear()
        first = params[0].float() * 1.0

        def look(grad: torch.Tensor) -> None:
            seen.append(len(rank.sent))
            # What has left is no longer held.
            assert params[2].grad is None

        first.register_hook(look)
        rest = params[2] if rank.number == 1 and unused == 1 else params[2] * params[1]
        loss = (first * rest.float()).sum() if unused != 0 or rank.number == 0 else rest.sum()
        optimizer.backward(loss)
        return [*seen, len(rank.sent)]

    # Six elements lie on each rank: the second of the three buckets has two owners.
    wanted = {None: [[3, 4], [3, 4]], 0: [[3, 4], [4]], 1: [[3, 4], [1, 4]]}[unused]
    assert World(2).run(run) == wanted


def hook_calls(count: int) -> float:
    """Python functions called by a hook, on average, while none of the parameters can leave yet."""
    optimizer: Any = built(None, (1,) * count)[1]
    buckets = optimizer._buckets
    (bucket,) = buckets._buckets
    called: list[str] = []
    held = weakref.ref(buckets)
    with buckets.opened():
        sys.setprofile(lambda frame, event, _: called.append(event))
        try:
            for place in range(count - 1):
                buckets._arrived(held, 0, place, bucket.params[place])
        finally:
            sys.setprofile(None)
    return called.count("call") / (count - 1)


def test_hooks_cost_the_same_however_many_parameters_there_are() -> None:
    assert hook_calls(5) == hook_calls(300) < 20


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("overlaps", [False, True])
def test_stage_2_keeps_partitions_and_buckets(world: int, overlaps: bool) -> None:
    """Bytes on each rank: sums in fp32 of its own partition, and buffers of bf16."""

    def run(rank: Rank) -> list[int]:
        options: dict[str, Any] = {"reduce_bucket_size": 20, "overlap_comm": overlaps}
        params, optimizer = built(
            rank.group("data"), SIZES, dtype=BRAIN, inside="FusedAdam", **options
        )
        for _ in range(2):
            optimizer.backward(torch.stack([p.float().sum() for p in params]).sum())
        optimizer.step()
        assert not optimizer.overflow
        told = optimizer.memory_report()
        kinds = ("model_weights", "master_weights", "accumulators", "gradients", "buckets")
        return [*(told[kind] for kind in kinds), told["optimizer_state"]]

    part = 32 // world
    buffers = 2 * 20 * (2 if overlaps else 1)
    assert World(world).run(run) == [[2 * 32, 4 * part, 4 * part, 0, buffers, 8 * part + 8]] * world
