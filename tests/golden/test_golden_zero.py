"""Shards of DeepSpeed's ZeRO: loaded on any number of ranks, continued bit for bit, or refused."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import on_ranks
from tests.helpers.sides import CLASSES, SIDES
from tests.helpers.zero_built import Group, place
from twinstep.contract.checkpoint import read_checkpoint
from twinstep.fast import deepspeed
from twinstep.golden.record_zero import (
    AFTER,
    ENDED,
    FOLDER,
    LIMIT,
    RUNS,
    SAVED,
    SCALING,
    SIZES,
    Made,
    groups_of,
    loss_of,
    weights_of,
)
from twinstep.parity.cases.fixed_inputs import bits

pytestmark = pytest.mark.usefixtures("replay")
Entry = dict[str, Any]
# Each dtype, stage, kind and number of ranks that saved, with every number that loads.
PLAIN = "fp16_stage1_rigid_2"


def shards(made: Made) -> list[Entry]:
    """The files of all ranks that saved."""
    return [read_checkpoint(FOLDER / made.name / made.shard(rank)) for rank in range(made.world)]


def states(made: Made) -> list[Entry]:
    """Entries as DeepSpeed's engine hands them to its optimizer."""
    return [shard["optimizer_state_dict"] for shard in shards(made)]


def built(
    side: str,
    made: Made,
    group: Group,
    make: Callable[..., Any] | None = None,
    prefix: str = "",
    **options: Any,
) -> tuple[list[torch.nn.Parameter], Any]:
    """An optimizer of other weights, around torch's AdamW as DeepSpeed's was."""
    params = weights_of(made.dtype)
    with torch.no_grad():
        for param in params:
            param.fill_(7.0)
    inner = torch.optim.AdamW(groups_of(params))
    for row in inner.param_groups if not made.elastic else ():
        row.update(lr=9.0, weight_decay=9.0)
    given: Entry = {
        "param_names": {param: f"{prefix}p{at}" for at, param in enumerate(params)},
        "dp_process_group": group,
        "dynamic_loss_scale": made.dtype == "fp16",
        "dynamic_loss_args": SCALING,
        "partition_grads": made.stage == 2,
        "verbose": False,
        **options,
    }
    return params, (make or CLASSES[side]["ZeroOptimizer"])(inner, **given)


def trained(
    params: list[torch.nn.Parameter], optimizer: Any, group: Group, world: int, steps: range
) -> None:
    for step in steps:
        optimizer.backward(loss_of(params, step, place(group), world))
        optimizer.step()


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


def changed(entry: Entry, **values: Any) -> Entry:
    """A shard with other values in its `optimizer_state_dict`."""
    return {**entry, "optimizer_state_dict": {**entry["optimizer_state_dict"], **values}}


def without(entry: Entry, key: str) -> Entry:
    inside = {k: v for k, v in entry["optimizer_state_dict"].items() if k != key}
    return {**entry, "optimizer_state_dict": inside}


def inner(entry: Entry, change: Callable[[Entry], Any]) -> Entry:
    """A shard with another state of its first group."""
    kept: Entry = copy.deepcopy(entry)
    change(kept["optimizer_state_dict"]["base_optimizer_state"])
    return kept


def half(entry: Entry, key: str = "single_partition_of_fp32_groups") -> Entry:
    first, *rest = entry["optimizer_state_dict"][key]
    return changed(entry, **{key: [first[:-1], *rest]})


WRONG: dict[str, tuple[Callable[[list[Entry]], Any], str]] = {
    "one": (lambda e: e[:1], r"partition_count=\[2, 2\], but should be \[1, 1\]"),
    "third": (lambda e: [*e, e[0]], r"partition_count=\[2, 2\], but should be \[3, 3\]"),
    "missing": (lambda e: [e[0], None], "entries have 0 elements of p1 from 2 to 2, but should"),
    "turned": (lambda e: e[::-1], "p0 has .* but should have .* in the shard of rank 0 of 2"),
    "twice": (lambda e: [e[0], e[0]], "p0 has .* but should have None in the shard of rank 1"),
    "cut": (lambda e: [half(e[0]), e[1]], r"has shape \(7,\), but should have 8 elements"),
    "mixed": (lambda e: [e[0], {"format": 1}], "state is none of DeepSpeed's ZeRO, but other"),
    "no dict": (lambda e: [e[0], 3], "state is none of DeepSpeed's ZeRO, but other entries are"),
    "no inner": (lambda e: [without(e[0], "base_optimizer_state"), e[1]], "state has no base_opt"),
    "no scaler": (lambda e: [changed(e[0], loss_scaler=3), e[1]], "loss_scaler should be one of D"),
    "scales": (
        lambda e: [e[0], changed(e[1], loss_scaler=scaler(e[1], cur_scale=2.0))],
        "entries have different loss_scaler",
    ),
    "counter": (
        lambda e: [changed(x, loss_scaler=scaler(x, cur_iter=-3)) for x in e],
        "cur_iter=-3, but should be at least 0",
    ),
    "static": (
        lambda e: [changed(x, loss_scaler=scaler(x, dynamic=False)) for x in e],
        "dynamic_loss_scale=False, but should be True",
    ),
    "clip": (lambda e: [e[0], changed(e[1], clip_grad=9.0)], "entries have different clip_grad"),
    "no clip": (lambda e: [changed(x, clip_grad="x") for x in e], "clip_grad='x', but should"),
    "stage": (lambda e: [e[0], changed(e[1], zero_stage=2)], "entries have different zero_stage"),
    "no list": (
        lambda e: [changed(e[0], single_partition_of_fp32_groups=3), e[1]],
        "single_partition_of_fp32_groups should be a list of 2, but is not",
    ),
    "one group": (
        lambda e: [changed(x, partition_count=[2]) for x in e],
        "partition_count should be a list of 2, but is not",
    ),
    "no tensor": (
        lambda e: [changed(x, single_partition_of_fp32_groups=["x", "y"]) for x in e],
        "single_partition_of_fp32_groups should be a tensor, but is not",
    ),
    "names": (
        lambda e: [changed(e[0], param_slice_mappings=[{"q": None}, {}]), e[1]],
        r"p0 has \(elements, first place\) None, but should have \(6, 0\)",
    ),
    "padding": (
        lambda e: [changed(x, param_alignment_paddings=[[0, "x", 0], [0]]) for x in e],
        "param_alignment_paddings has .*, but should have 3 whole numbers",
    ),
    "moment": (
        lambda e: [inner(x, lambda s: s["state"][0].update(exp_avg=torch.zeros(3))) for x in e],
        r"exp_avg has shape \(3,\), but should have (6 to )?8 elements",
    ),
    "half": (
        lambda e: [inner(x, lambda s: s["state"][0].update(exp_avg=half_of(s))) for x in e],
        "exp_avg is torch.float16, but should be torch.float32",
    ),
    "steps": (
        lambda e: [e[0], inner(e[1], lambda s: s["state"][0].update(step=torch.tensor(9.0)))],
        "step is 2.0, 9.0 in one group, but should be of one save",
    ),
    "no step": (
        lambda e: [inner(x, lambda s: s["state"][0].pop("step")) for x in e],
        "has exp_avg, exp_avg_sq, but should have step, exp_avg",
    ),
    "groups": (
        lambda e: [inner(x, lambda s: s["param_groups"].pop()) for x in e],
        "param_groups should be a list of 2, but is not",
    ),
    "rate": (
        lambda e: [inner(x, lambda s: s["param_groups"][0].update(lr="x")) for x in e],
        "lr='x', but should be a number",
    ),
}


def half_of(state: Entry) -> torch.Tensor:
    moment: torch.Tensor = state["state"][0]["exp_avg"]
    return moment.half()


def scaler(entry: Entry, **values: Any) -> Any:
    """The scaler of a shard with other attributes."""
    kept = copy.copy(entry["optimizer_state_dict"]["loss_scaler"])
    vars(kept).update(values)
    return kept


@pytest.mark.parametrize("side", SIDES)
def test_what_does_not_fit_is_refused_in_a_sentence_and_changes_nothing(side: str) -> None:
    made = RUNS[PLAIN]

    def run(group: Group) -> list[str]:
        params, optimizer = built(side, made, group)
        optimizer.load_state_dict(shards(made), load_from_fp32_weights=True)
        before = [bits(param.detach()) for param in params], str(optimizer.state_dict())
        said = []
        for spoil, _ in WRONG.values():
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - sentences are compared below
                optimizer.load_state_dict(spoil(shards(made)), load_from_fp32_weights=True)
            said.append(str(caught.value))
            found = [bits(param.detach()) for param in params], str(optimizer.state_dict())
            assert found == before, said
        return said

    for (_, message), *said in zip(WRONG.values(), *on_ranks(2, run), strict=True):
        own = [each for each in said if "another rank" not in each]
        assert own
        assert [each for each in own if not re.search(message, each) or "\n" in each] == []


def test_a_shard_that_one_rank_alone_finds_broken_changes_no_rank() -> None:
    made = RUNS[PLAIN]

    def run(group: Group) -> str:
        params, optimizer = built("reference", made, group)
        given = shards(made)
        if place(group):
            given[1] = half(given[1])
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
            optimizer.load_state_dict(given, load_from_fp32_weights=True)
        assert params[0].unique().tolist() == [7.0]
        assert not optimizer.state
        return str(caught.value)

    other, own = on_ranks(2, run)
    assert "has shape (5,), but should have 6 to 8 elements" in own
    assert "another rank (1) cannot" in other


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def code(file: Path) -> None:
    torch.save({"optimizer_state_dict": file}, file)


@pytest.mark.parametrize("spoil", [cut_off, code, Path.unlink])
def test_a_file_that_one_rank_cannot_read_is_read_by_none(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    made = RUNS[PLAIN]
    shutil.copytree(FOLDER / made.name, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / made.shard(1))

    def run(group: Group) -> str:
        params, optimizer = built("reference", made, group)
        own = tmp_path / made.shard(place(group))
        with pytest.raises((ValueError, OSError)) as caught:
            read_checkpoint(own, optimizer.ranks)
        assert params[0].unique().tolist() == [7.0]
        return str(caught.value)

    other, own = on_ranks(2, run)
    assert "another rank (1) cannot" in other
    assert made.shard(1) in own
    assert "\n" not in own


def test_other_models_are_refused() -> None:
    made = RUNS["fp16_stage2_elastic_1"]
    params = weights_of("fp16")
    inner = torch.optim.AdamW(groups_of(params)[:1])
    names = {param: f"p{at}" for at, param in enumerate(params)}
    other = CLASSES["reference"]["ZeroOptimizer"](inner, param_names=names, verbose=False)
    with pytest.raises(ValueError, match="partition_count should be a list of 1, but is not"):
        other.load_state_dict(shards(made))
    params, other = built("reference", made, None, prefix="model.")
    with pytest.raises(ValueError, match=r"model.p0 has .* None, but should have \(6, 0\)"):
        other.load_state_dict(shards(made), load_from_fp32_weights=True)
    assert params[0].unique().tolist() == [7.0]
