"""Checkpoints of the fast BF16Optimizer are the reference's: either side loads the other's."""

import io
from typing import Any

import pytest
import torch

from tests.fast.test_fast_bf16_optimizer import Twins
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")


def through_a_file(entry: object) -> object:
    file = io.BytesIO()
    torch.save(entry, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("source", ["fast", "reference"])
def test_a_run_goes_on_from_a_checkpoint_of_either_side(source: str) -> None:
    twins = Twins(clip_grad=0.5)
    for number in range(3):
        twins.backward(number)
        twins.step()
    entry = through_a_file(getattr(twins, source).state_dict())
    resumed = Twins(clip_grad=2.0)
    for optimizer, _ in resumed.both():
        optimizer.load_state_dict([entry], load_from_fp32_weights=True)
        assert optimizer.clip_grad == 0.5
    resumed.check()
    for number in range(3, 6):
        for each in (twins, resumed):
            each.backward(number)
            each.step()
            each.check()
    for left, right in zip(resumed.params[0], twins.params[0], strict=True):
        assert bool(same(left.detach(), right.detach()).all())


def test_both_sides_save_the_same_entry() -> None:
    twins = Twins(clip_grad=0.5)
    for number in range(2):
        ours, theirs = twins.fast.state_dict(), twins.reference.state_dict()
        assert list(ours) == list(theirs)
        for key in ("clip_grad", "group_paddings", "partition_count", "ds_version"):
            assert ours[key] == theirs[key]
        assert ours["param_slice_mappings"] == theirs["param_slice_mappings"]
        inner = [entry["base_optimizer_state"] for entry in (ours, theirs)]
        assert inner[0]["param_groups"] == inner[1]["param_groups"]
        assert inner[0]["state"].keys() == inner[1]["state"].keys()
        twins.backward(number)
        twins.step()


@pytest.mark.parametrize("keep", [False, True])
def test_without_fp32_weights_masters_come_from_the_model(keep: bool) -> None:
    twins = Twins(compat={"keep_masters_on_load": keep})
    twins.backward(0)
    twins.step()
    for optimizer, _ in twins.both():
        optimizer.load_state_dict([optimizer.state_dict()], load_optimizer_states=keep)
    twins.check()


@pytest.mark.parametrize("source", ["fast", "reference"])
def test_entries_of_two_ranks_are_joined_for_one(source: str) -> None:
    twins = Twins([[(7,), (5, 3)]])
    twins.backward(0)
    twins.step()
    whole = getattr(twins, source).state_dict()
    size = 12  # two ranks pad 22 elements to 24
    entries = []
    for rank in range(2):
        entry = {**whole, "partition_count": [2]}
        place = slice(rank * size, (rank + 1) * size)
        flat = whole["single_partition_of_fp32_groups"][0]
        padded = torch.cat([flat, torch.zeros(2)])
        entry["single_partition_of_fp32_groups"] = [padded[place]]
        state = whole["base_optimizer_state"]["state"][0]
        cut = {
            key: torch.cat([value, torch.zeros(2)])[place] if value.dim() else value
            for key, value in state.items()
        }
        entry["base_optimizer_state"] = {**whole["base_optimizer_state"], "state": {0: cut}}
        entries.append(entry)
    resumed = Twins([[(7,), (5, 3)]])
    for optimizer, _ in resumed.both():
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
    resumed.check()
    left, right = resumed.fast.groups[0], getattr(twins, source).groups[0]
    assert bool(same(left.master.detach(), right.master.detach()).all())


def damaged(entry: dict[str, Any], what: str) -> object:
    """An entry that does not fit."""
    inner = entry["base_optimizer_state"]
    if what == "no dict":
        return 3
    if what == "keys":
        return {key: value for key, value in entry.items() if key != "ds_version"}
    if what == "masters":
        return {**entry, "single_partition_of_fp32_groups": []}
    if what == "longer":
        return {**entry, "single_partition_of_fp32_groups": [torch.zeros(9999), torch.zeros(2)]}
    if what == "clip":
        return {**entry, "clip_grad": "a lot"}
    if what == "groups":
        return {**entry, "base_optimizer_state": {**inner, "param_groups": []}}
    state = dict(inner["state"][0])
    if what == "moment":
        state["exp_avg"] = torch.zeros(3)
    elif what == "half":
        del state["exp_avg_sq"]
    else:
        state["step"] = 1.5
    return {**entry, "base_optimizer_state": {**inner, "state": {0: state}}}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no dict", "state is a int, but should be a dict"),
        ("keys", "state has no ds_version, but should"),
        ("masters", "has 0 tensors, but should have 2"),
        ("longer", "has 9999 elements, but should have 216"),
        ("clip", "clip_grad='a lot', but should be a number"),
        ("groups", r"groups of \[\] parameters, but should have \[1, 1\]"),
        ("moment", r"exp_avg of parameter 0 has shape \(3,\), but should have \(216,\)"),
        ("half", "parameter 0 has step, exp_avg, but should have step, exp_avg, exp_avg_sq"),
        ("count", "step=1.5, but should be a whole number"),
    ],
)
def test_an_entry_that_does_not_fit_changes_nothing(what: str, says: str) -> None:
    twins = Twins()
    twins.backward(0)
    twins.step()
    entry = damaged(twins.fast.state_dict(), what)
    with pytest.raises(ValueError, match=says):
        twins.fast.load_state_dict([entry], load_from_fp32_weights=True)
    twins.check()
