"""ZeroOptimizer of the reference: gradients of ranks and micro-batches, edge by edge."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import on_ranks
from tests.helpers.zero_built import (
    BRAIN,
    HALF,
    SINGLE,
    Group,
    built,
    fill,
    masters,
    moves,
    place,
    sided,
)
from twinstep.parity.cases.fixed_inputs import bits
from twinstep.parity.ranks.world import Rank, World

STAGES = (False, True)


@pytest.mark.parametrize("stage2", STAGES)
@pytest.mark.parametrize("sums", [HALF, SINGLE])
def test_gradients_of_ranks_become_their_mean(stage2: bool, sums: torch.dtype) -> None:
    """Edge Z-1: stage 1 with sums in another dtype once updated with local gradients."""

    def run(group: Group) -> Any:
        params, optimizer = built(group, partition_grads=stage2, gradient_accumulation_dtype=sums)
        own = 1.0 + 2.0 * place(group)
        return moves(params, optimizer, [own]), optimizer.get_global_norm()

    assert on_ranks(2, run) == [([2.0, 2.0, 2.0], pytest.approx(math.sqrt(48)))] * 2


@pytest.mark.parametrize("stage2", STAGES)
def test_small_gradients_survive_in_sums_of_fp32(stage2: bool) -> None:
    """Edge Z-2: stage 2 once summed in the dtype of the model, which gives 64."""

    def run(**options: Any) -> float:
        params, optimizer = built(None, (1,), dtype=BRAIN, partition_grads=stage2, **options)
        return moves(params, optimizer, [64.0, 0.25, 0.25, 0.25])[0]

    # Stage 1 sends its sums, rounded to the dtype of the wire.
    assert run() == (64.75 if stage2 else 65.0)
    assert run(communication_data_type=SINGLE) == 64.75
    assert run(gradient_accumulation_dtype=BRAIN) == 64.0


def test_round_robin_keeps_every_parameter_its_own_values() -> None:
    """Edges Z-3 and TF-7: fragments follow the order in which parameters lie."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, (4, 3, 5, 1, 2), round_robin_gradients=True)
        wholes = [bits(optimizer.get_full_hp_param(f"p{slot}")) for slot in range(5)]
        optimizer.set_full_hp_param("p1", torch.tensor([7.0, 8.0, 9.0]))
        optimizer.update_lp_params()
        order = [[param.numel() for param in group] for group in optimizer.bit16_groups]
        laid = [[p.numel() for p in group] for group in optimizer.round_robin_bit16_groups]
        same = [bits(param.detach().float()) for param in params]
        return [wholes[0] == same[0], wholes[2] == same[2], params[1].tolist(), order, laid]

    wanted = [True, True, [7.0, 8.0, 9.0], [[4, 3, 5, 1, 2]], [[4, 5, 2, 3, 1]]]
    assert on_ranks(2, run) == [wanted] * 2


def test_every_group_shows_its_state_after_a_first_step() -> None:
    """Edge Z-4; CK-14: state is fp32."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", split=1)
        fill(params, 0.5)
        optimizer.step()
        states = [optimizer.get_full_hp_param(f"p{slot}", "exp_avg") for slot in range(3)]
        kept = {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"}
        return [[state.unique().tolist() for state in states], kept]

    tenth = torch.tensor(0.5).mul(torch.tensor(1 - 0.9, dtype=torch.float64).float()).item()
    assert on_ranks(2, run) == [[[[tenth]] * 3, {torch.float32}]] * 2


@pytest.mark.parametrize("stage2", STAGES)
@pytest.mark.parametrize("offload", [None, SimpleNamespace(device="cpu", pin_memory=True)])
def test_a_parameter_that_is_used_at_times_counts_when_it_is_used(
    stage2: bool, offload: object
) -> None:
    """Edges Z-6 and Z-7: in the first of two micro-batches, and in the first of three steps."""
    params, optimizer = built(
        None, (2, 2), partition_grads=stage2, offload_optimizer_config=offload
    )
    found = []
    for step in range(3):
        before = masters(params, optimizer)
        for micro in range(2):
            params[1].grad = torch.ones_like(params[1])
            if step == 0 and micro == 0:
                params[0].grad = torch.full_like(params[0], 0.5)
            optimizer.reduce_gradients()
        optimizer.step()
        after = masters(params, optimizer)
        found.append([(a - b)[0].item() for a, b in zip(before, after, strict=True)])
    assert found == [[0.5, 2.0], [0.0, 2.0], [0.0, 2.0]]


@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_buckets_that_are_not_contiguous_are_reduced_too(reduce_scatter: bool) -> None:
    """Edge Z-9: on the CPU they once kept the values of each rank."""

    def run(group: Group) -> list[float]:
        options: dict[str, Any] = {"contiguous_gradients": False, "reduce_scatter": reduce_scatter}
        params, optimizer = built(group, **options)
        return moves(params, optimizer, [1.0 + 2.0 * place(group)])

    assert on_ranks(2, run) == [[2.0, 2.0, 2.0]] * 2


def with_experts(rank: Rank, **options: Any) -> tuple[list[nn.Parameter], Any]:
    """A shared parameter and an expert, which another rank has another one of."""
    params = [nn.Parameter(torch.ones(size, dtype=HALF)) for size in (3, 4)]
    params[1].allreduce, params[1].group_name = False, "e"  # type: ignore[attr-defined]
    inside = torch.optim.SGD([params[0]], lr=1.0)
    inside.add_param_group({"params": [params[1]], "moe": True, "name": "e"})
    make = sided("ZeroOptimizer")
    return params, make(
        inside,
        param_names={param: f"p{slot}" for slot, param in enumerate(params)},
        dp_process_group=rank.group("data", "expert"),
        expert_parallel_group={"e": rank.group("expert")},
        expert_data_parallel_group={"e": rank.group("data")},
        has_moe_layers=True,
        **options,
    )


@pytest.mark.parametrize("multi_rank", [True, False])
@pytest.mark.parametrize("stage2", STAGES)
def test_gradients_of_experts_are_means_over_all_data_parallel_ranks(
    stage2: bool, multi_rank: bool
) -> None:
    """Edges Z-13 and Z-28: over four ranks, two of which have each expert."""

    def run(rank: Rank) -> list[float]:
        options: dict[str, Any] = {
            "use_multi_rank_bucket_allreduce": multi_rank,
            "partition_grads": stage2,
        }
        params, optimizer = with_experts(rank, **options)
        return moves(params, optimizer, [float(2**rank.number)])

    # Ranks 0 and 2 have one expert, 1 and 3 the other.
    wanted = [[15 / 4, 5 / 4], [15 / 4, 10 / 4]] * 2
    assert World({"data": 2, "expert": 2}).run(run) == wanted


def test_a_mean_is_divided_before_it_is_sent() -> None:
    """Edge Z-14: in fp16 half of the smallest gradient is nothing; fp32 can be sent instead."""

    def run(wire: torch.dtype | None) -> list[list[float]]:
        def one(group: Group) -> list[float]:
            params, optimizer = built(group, (1,), communication_data_type=wire)
            with torch.no_grad():
                params[0].zero_()
            optimizer.refresh_fp32_params()
            return moves(params, optimizer, [2.0**-24])

        return on_ranks(2, one)

    assert run(None) == [[0.0]] * 2
    assert run(SINGLE) == [[2.0**-24]] * 2


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"reduce_scatter": False}, 2.5),
        ({"reduce_scatter": False, "gradient_predivide_factor": 2.0}, 2.5),
        ({"reduce_scatter": False, "gradient_predivide_factor": 4.0}, 2.5),
        ({"reduce_scatter": False, "postscale_gradients": False}, 2.5),
        ({"gradient_average": False}, 10.0),
        ({"gradient_average": False, "postscale_gradients": False}, 10.0),
        ({"gradient_average": False, "reduce_scatter": False}, 10.0),
    ],
)
def test_options_say_where_a_mean_divides(options: dict[str, Any], moved: float) -> None:
    def run(group: Group) -> list[float]:
        params, optimizer = built(group, (3,), **options)
        return moves(params, optimizer, [1.0 + place(group)])

    assert on_ranks(4, run) == [[moved]] * 4


@pytest.mark.parametrize(("factor", "overflows"), [(1.0, True), (2.0, False), (4.0, False)])
def test_a_predivided_sum_overflows_later(factor: float, overflows: bool) -> None:
    """Four gradients of 20000 pass 65504 in fp16; halves of them do not."""

    def run(group: Group) -> bool:
        options: dict[str, Any] = {"reduce_scatter": False, "gradient_predivide_factor": factor}
        params, optimizer = built(group, (3,), **options)
        fill(params, 20000.0)
        optimizer.step()
        return optimizer.overflow

    assert on_ranks(4, run) == [overflows] * 4


def test_a_missing_gradient_is_one_of_zeros() -> None:
    """Edge Z-15: moments and decay move on."""
    params, optimizer = built(None, (2, 2), inside="FusedAdam")
    fill(params, 1.0)
    optimizer.step()
    before = [optimizer.get_full_hp_param("p0", key) for key in (None, "exp_avg")]
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    after = [optimizer.get_full_hp_param("p0", key) for key in (None, "exp_avg")]
    assert all(bool((old != new).all()) for old, new in zip(before, after, strict=True))
    assert [int(s["step"]) for s in optimizer.state.values()] == [2]


@pytest.mark.parametrize("stage2", STAGES)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_forgets_all_sums(stage2: bool, to_none: bool) -> None:
    """Edge Z-25: upstream keeps those of earlier micro-batches unless gradients become None."""
    params, optimizer = built(None, (2,), partition_grads=stage2)
    for _ in range(2):
        fill(params, 5.0)
        optimizer.fill_grad_accum_attribute()
        optimizer.reduce_gradients()
        fill(params, 5.0)
        optimizer.zero_grad(set_to_none=to_none)
    assert moves(params, optimizer, [1.0]) == [1.0]


@pytest.mark.parametrize("sizes", [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_empty_parameters_train_with_the_others(sizes: tuple[int, ...]) -> None:
    """Edge Z-27."""

    def run(group: Group) -> list[float]:
        params, optimizer = built(group, sizes)
        return moves(params, optimizer, [1.0])

    assert on_ranks(2, run) == [[1.0, 1.0]] * 2
    assert on_ranks(1, run) == [[1.0, 1.0]]


@pytest.mark.parametrize("stage2", STAGES)
def test_several_backwards_add_up(stage2: bool) -> None:
    """Edge Z-29: upstream keeps the last one alone."""

    def run(group: Group) -> list[float]:
        params, optimizer = built(group, partition_grads=stage2, static_loss_scale=8.0)
        before = masters(params, optimizer)
        for factor in (1.0, 2.0):
            optimizer.backward(sum((factor * p.float()).sum() for p in params))  # type: ignore[arg-type]
            assert all(param.grad is None for param in params)
        optimizer.step()
        after = masters(params, optimizer)
        return [(old - new)[0].item() for old, new in zip(before, after, strict=True)]

    assert on_ranks(2, run) == [[3.0, 3.0, 3.0]] * 2


def test_gradients_that_are_handed_out_are_those_that_are_stored() -> None:
    """Edge TF-2: means, times the loss scale, not clipped; stage 1 has them once reduced."""

    def run(group: Group) -> list[Any]:
        found: list[Any] = []
        for stage2 in STAGES:
            options: dict[str, Any] = {
                "static_loss_scale": 4.0,
                "clip_grad": 0.1,
                "partition_grads": stage2,
            }
            params, optimizer = built(group, **options)
            own = 1.0 + 2.0 * place(group)
            optimizer.backward(sum((own * p.float()).sum() for p in params))  # type: ignore[arg-type]
            found.append(optimizer.get_full_hp_grad("p1").tolist())
            optimizer.reduce_gradients()
            found.append(optimizer.get_full_hp_grad("p1").tolist())
            optimizer.step()
            found.append(optimizer.get_full_hp_grad("p1").tolist())
        return found

    none, stored = [0.0] * 3, [8.0] * 3
    assert on_ranks(2, run) == [[none, stored, none, stored, stored, none]] * 2
