"""Shards of DeepSpeed's ZeRO that do not fit: refused in one sentence, and nothing has changed."""

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
from tests.helpers.zero_shards import Entry, built, shards
from twinstep.contract.checkpoint import read_checkpoint
from twinstep.golden.record_zero import FOLDER, RUNS, groups_of, weights_of
from twinstep.parity.cases.fixed_inputs import bits

pytestmark = pytest.mark.usefixtures("replay")
PLAIN = "fp16_stage1_rigid_2"


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
