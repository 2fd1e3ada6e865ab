"""Shards of DeepSpeed's ZeRO: loaded on any number of ranks, and continued bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import on_ranks
from tests.helpers.sides import SIDES
from tests.helpers.zero_built import Group, place
from tests.helpers.zero_shards import Entry, built, shards, states, trained
from twinstep.contract.checkpoint import read_checkpoint
from twinstep.fast import deepspeed
from twinstep.golden.record_zero import (
    AFTER,
    ENDED,
    FOLDER,
    LIMIT,
    RUNS,
    SAVED,
    SIZES,
    Made,
    weights_of,
)
from twinstep.parity.cases.fixed_inputs import bits

pytestmark = pytest.mark.usefixtures("replay")


def continued(side: str, made: Made, world: int, given: Any, **options: Any) -> list[Any]:
    """Weights, masters, scale and counters of every rank after DeepSpeed's further steps."""

    def run(group: Group) -> list[Any]:
        params, optimizer = built(side, made, group, **options)
        optimizer.load_state_dict(given, load_from_fp32_weights=True)
        assert optimizer.clip_grad == LIMIT
        assert [row["lr"] for row in optimizer.param_groups] == [0.25, 0.0625]
        trained(params, optimizer, group, world, range(SAVED, ENDED))
        found = [bits(param.detach()) for param in params]
        found += [bits(optimizer.get_full_hp_param(f"p{at}")) for at in range(len(params))]
        return [*found, {**optimizer.state_dict()["loss_scaler"]}]

    return on_ranks(world, run)


def ended(made: Made) -> list[Any]:
    """The same of DeepSpeed's own run; its masters lie as the run laid them."""
    after: Entry = read_checkpoint(FOLDER / made.name / AFTER)
    weights = after["weights"]
    found = [bits(weight) for weight in weights]
    whole = {}
    first = 0
    for shapes, flat in zip(SIZES, after["masters"], strict=True):
        order = list(range(len(shapes)))
        if made.dealt:
            order = [at for rank in range(made.world) for at in order[rank :: made.world]]
        start = 0
        for at in order:
            size = torch.Size(shapes[at]).numel()
            # 16 bytes are eight weights.
            whole[first + at] = flat[start : start + size]
            start += size + (-(start + size) % 8 if made.aligned and at != order[-1] else 0)
        first += len(shapes)
    found += [bits(whole[at]) for at in range(len(weights))]
    return [*found, after["scale"]]


def same(found: list[Any], wanted: list[Any], dtype: str) -> None:
    """Compare the bits, and of the scaler what DeepSpeed's has."""
    assert found[:-1] == wanted[:-1]
    if dtype == "fp16":
        assert {key: found[-1][key] for key in wanted[-1]} == wanted[-1]
        assert wanted[-1]["cur_hysteresis"] == 1
        assert wanted[-1]["cur_scale"] == 8.0


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_deepspeeds_goes_on_with_its_bits_on_any_number_of_ranks(name: str) -> None:
    made = RUNS[name]
    whole = shards(made)
    # A whole file says in which order parameters lie; the dict in it does not.
    for world in (made.world,) if made.stage == 1 else (1, 2, 3, 4):
        for found in continued("reference", made, world, whole):
            same(found, ended(made), made.dtype)
    if not made.dealt:
        for found in continued("reference", made, 2, states(made)):
            same(found, ended(made), made.dtype)


@pytest.mark.parametrize("name", ["fp16_stage2_elastic_2", "bf16_stage1_rigid_2"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_fast_side_goes_on_with_the_same_bits(name: str, world: int) -> None:
    made = RUNS[name]
    for found in continued("fast", made, world, shards(made)):
        same(found, ended(made), made.dtype)


def test_deepspeeds_own_signature_loads_them_elastic_or_rigid() -> None:
    made = RUNS["fp16_stage2_rigid_2"]

    def like_theirs(inner: Any, **given: Any) -> Any:
        return deepspeed.DeepSpeedZeroOptimizer(
            inner, given.pop("param_names"), None, None, **given
        )

    for found in continued("fast", made, 2, states(made), make=like_theirs):
        same(found, ended(made), made.dtype)
    elastic = {"make": like_theirs, "elastic_checkpoint": True}
    for found in continued("fast", made, 1, states(made), **elastic):
        same(found, ended(made), made.dtype)
    with pytest.raises(
        ValueError, match="2 entries were given, but should be 1, .* elastic_checkp"
    ):
        continued("fast", made, 1, states(made), make=like_theirs)


@pytest.mark.parametrize("side", SIDES)
def test_a_rigid_rank_reads_its_own_shard_alone(side: str) -> None:
    made = RUNS["bf16_stage2_rigid_2"]

    def run(group: Group) -> list[Any]:
        own: list[Any] = [None, None]
        own[place(group)] = shards(made)[place(group)]
        params, optimizer = built(side, made, group, elastic_checkpoint=False)
        optimizer.load_state_dict(own, load_from_fp32_weights=True)
        trained(params, optimizer, group, 2, range(SAVED, ENDED))
        return [bits(param.detach()) for param in params]

    assert on_ranks(2, run) == [ended(made)[: len(weights_of(made.dtype))]] * 2


@pytest.mark.parametrize("elastic", [True, False])
def test_a_counter_may_be_that_of_the_group_alone(elastic: bool) -> None:
    """Some of DeepSpeed's optimizers have it there."""
    made = RUNS[f"fp16_stage2_{'elastic' if elastic else 'rigid'}_2"]
    given = states(made)
    for state in given:
        inside = state["base_optimizer_state"]
        for held in inside if elastic else inside["state"].values():
            assert held.pop("step") == 2
        for group in () if elastic else inside["param_groups"]:
            group["step"] = 2
        if elastic:
            state["base_optimizer_state_step"] = 2
    for found in continued("reference", made, 3, given):
        same(found, ended(made), made.dtype)


def test_the_order_of_a_bare_state_is_that_of_who_loads_it() -> None:
    made = RUNS["fp16_stage2_rigid_dealt_2"]
    for found in continued("reference", made, 2, states(made), round_robin_gradients=True):
        same(found, ended(made), made.dtype)
    # Two parameters of one size would change places; these have other sizes, and lie elsewhere.
    wrong = continued("reference", made, 2, states(made))
    assert wrong[0][:-1] != ended(made)[:-1]


def test_state_may_be_left_and_masters_may_come_from_the_model() -> None:
    made = RUNS["bf16_stage1_elastic_1"]
    params, optimizer = built("reference", made, None)
    optimizer.load_state_dict(shards(made), load_optimizer_states=False)
    assert not optimizer.state
    assert optimizer.get_full_hp_param("p0").unique().tolist() == [7.0]
    assert params[0].unique().tolist() == [7.0]
