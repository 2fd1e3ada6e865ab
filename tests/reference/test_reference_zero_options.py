"""ZeroOptimizer of the reference: options that are refused, and what ranks should have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.ranks import on_ranks
from tests.helpers.zero_built import BRAIN, HALF, Group, built, fill, place, sided, trained
from twinstep.contract.timers import PhaseTimers
from twinstep.parity.ranks.world import Rank, World

DIVIDES = "with reduce_scatter=True, which divides before it sums"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"allgather_bucket_size": 7}, "allgather_bucket_size=7, but should be even"),
    ({"allgather_bucket_size": 0}, "allgather_bucket_size=0, but should be positive"),
    ({"reduce_bucket_size": 0}, "reduce_bucket_size=0, but should be positive"),
    (
        {"communication_data_type": torch.float64},
        "communication_data_type=torch.float64, but should be float16 or bfloat16 or float32",
    ),
    (
        {"gradient_accumulation_dtype": None},
        "gradient_accumulation_dtype=None, but should be float16 or bfloat16 or float32",
    ),
    ({"gradient_predivide_factor": 2.0}, f"gradient_predivide_factor=2.0, .* 1.0 {DIVIDES}"),
    ({"postscale_gradients": False}, f"postscale_gradients=False, but should be True {DIVIDES}"),
    (
        {"postscale_gradients": False, "partition_grads": False},
        f"postscale_gradients=False, but should be True {DIVIDES}",
    ),
    (
        {"gradient_predivide_factor": 0.0, "reduce_scatter": False},
        "gradient_predivide_factor=0.0, but should be positive and finite",
    ),
    (
        {"has_moe_layers": True, "reduce_scatter": False},
        "reduce_scatter=False, but should be True with has_moe_layers=True",
    ),
    (
        {"has_moe_layers": True, "contiguous_gradients": False},
        "contiguous_gradients=False, but should be True with has_moe_layers=True",
    ),
    ({"has_moe_layers": True}, "has_moe_layers=True, but no group is marked moe"),
    (
        {"fp16_master_weights_and_gradients": True},
        "fp16_master_weights_and_gradients=True, but should be False: master weights are fp32",
    ),
    (
        {"bf16_master_weights_and_gradients": True},
        "bf16_master_weights_and_gradients=True, but should be False: master weights are fp32",
    ),
    ({"bf16_optimizer_states": True}, "bf16_optimizer_states=True, but should be False"),
    ({"zenflow_config": {}}, "zenflow_config={}, but should be None"),
    ({"ignore_unused_parameters": False}, "ignore_unused_parameters=False, but should be True"),
    (
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"hysteresis": 2}},
        "dynamic_loss_args has hysteresis, but should have some of init_scale, scale_window",
    ),
    ({"static_loss_scale": 0.0}, "loss scale is 0.0, but should be positive and finite"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_make_no_sense_are_refused_in_one_sentence(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        built(None, **options)
    assert "\n" not in str(caught.value)


def test_a_group_marked_moe_holds_experts_alone() -> None:
    param = nn.Parameter(torch.ones(2, dtype=HALF))
    inside = torch.optim.SGD([{"params": [param], "moe": True, "name": "e"}])
    make = sided("ZeroOptimizer")
    with pytest.raises(ValueError, match="group is marked moe, but not all its parameters are"):
        make(inside, param_names={param: "p"}, has_moe_layers=True)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("expert_parallel_group", "expert_parallel_group has no group for experts e"),
        ("expert_data_parallel_group", "expert_data_parallel_group has no group for experts e"),
        ("dp_process_group", r"has ranks \[\d\], but dp_process_group has \[\d\]"),
    ],
)
def test_experts_need_groups_within_the_data_parallel_ranks(missing: str, message: str) -> None:
    def run(rank: Rank) -> None:
        param: Any = nn.Parameter(torch.ones(2, dtype=HALF))
        param.allreduce, param.group_name = False, "e"
        inside = torch.optim.SGD([{"params": [param], "moe": True, "name": "e"}])
        given: dict[str, Any] = {
            "dp_process_group": rank.group("data"),
            "expert_parallel_group": {"e": rank.group("data")},
            "expert_data_parallel_group": {"e": rank.new_group([rank.number])},
        }
        del given[missing]
        if missing == "dp_process_group":
            given[missing] = rank.new_group([rank.number])
        make = sided("ZeroOptimizer")
        with pytest.raises(ValueError, match=message):
            make(inside, param_names={param: "p"}, has_moe_layers=True, **given)

    World({"data": 2}).run(run)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("partition_grads", (True, False)),
        ("clip_grad", (1.0, 2.0)),
        ("communication_data_type", (None, torch.float32)),
        ("gradient_average", (True, False)),
        ("round_robin_gradients", (True, False)),
    ],
)
def test_ranks_that_were_given_other_options_all_refuse(name: str, values: Any) -> None:
    def run(group: Group) -> str:
        with pytest.raises(ValueError, match="but should be the same on all") as caught:
            built(group, **{name: values[place(group)]})
        return str(caught.value)

    told = on_ranks(2, run)
    assert told[0] == told[1]
    assert name in told[0] or name == "round_robin_gradients"


def test_every_parameter_has_a_name_of_its_own() -> None:
    params = [nn.Parameter(torch.ones(2, dtype=HALF)) for _ in range(2)]
    make = sided("ZeroOptimizer")
    with pytest.raises(ValueError, match="param_names gives p to several parameters"):
        make(torch.optim.SGD(params), param_names=dict.fromkeys(params, "p"))
    with pytest.raises(ValueError, match="param_names has no name for parameter 1"):
        make(torch.optim.SGD(params), param_names={params[0]: "p"})


def test_frozen_parameters_are_left_alone() -> None:
    def run(group: Group) -> list[Any]:
        params = [nn.Parameter(torch.ones(2, dtype=HALF), slot != 1) for slot in range(3)]
        inside = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
        make = sided("ZeroOptimizer")
        optimizer = make(
            inside, param_names={p: f"p{i}" for i, p in enumerate(params)}, dp_process_group=group
        )
        for param in params[::2]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [param.tolist() for param in params]

    assert on_ranks(3, run) == [[[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]] * 3


def test_the_loss_scale_is_that_of_the_arguments() -> None:
    _, optimizer = built(None, dynamic_loss_scale=True)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (65536.0, True)
    _, optimizer = built(None, static_loss_scale=8.0, dynamic_loss_args={"init_scale": 2.0})
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (8.0, False)
    _, optimizer = built(None, dtype=BRAIN, dynamic_loss_scale=True, static_loss_scale=8.0)
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale) == (1.0, False)


def test_timers_are_called_by_phase_and_on_a_skip() -> None:
    timers = PhaseTimers()
    params, optimizer = built(None, timers=timers)
    fill(params, 1.0)
    optimizer.step()
    fill(params, float("inf"))
    optimizer.step()
    phases = ("optimizer_gradients", "optimizer_step", "optimizer_allgather")
    assert [timers(name).count for name in phases] == [2, 2, 2]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_masters_and_state_are_split_and_gathered_weights_are_whole(world: int) -> None:
    """Bytes on each rank: 12 elements; gradients are still whole on the reference."""

    def run(group: Group) -> dict[str, int]:
        params, optimizer = built(group, inside="FusedAdam")
        optimizer.initialize_optimizer_states()
        found = optimizer.memory_report()
        assert optimizer.partition_size == [16 // world if world == 4 else 12 // world]
        assert [int(state["step"]) for state in optimizer.state.values()] == [0]
        return {**found, "padding": optimizer.groups_padding[0]}

    size = 16 if world == 4 else 12
    for number, found in enumerate(on_ranks(world, run)):
        assert found["model_weights"] == 2 * size
        assert found["master_weights"] == 4 * size // world
        assert found["optimizer_state"] == 8 * size // world + 8
        assert found["padding"] == (4 if world == 4 and number == 3 else 0)


def test_a_checkpoint_of_ranks_is_taken_up_after_other_steps() -> None:
    """Edge Z-5: states that are loaded after a step are found under their names."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(group, inside="FusedAdam", split=1)
        trained(params, optimizer, range(2))
        saved: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(saved, optimizer.state_dict(), group=group)
        wanted = [optimizer.get_full_hp_param(f"p{slot}", "exp_avg") for slot in range(3)]
        trained(params, optimizer, range(2, 4))
        optimizer.load_state_dict(saved, load_from_fp32_weights=True)
        found = [optimizer.get_full_hp_param(f"p{slot}", "exp_avg") for slot in range(3)]
        return [bool((a == b).all()) for a, b in zip(wanted, found, strict=True)]

    assert on_ranks(2, run) == [[True] * 3] * 2
