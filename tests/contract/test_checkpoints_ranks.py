"""Checkpoints over ranks: what one rank refuses, no rank loads, and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.battery import Twins as AnyTwins
from tests.helpers.partitions import built, seen, trained
from tests.helpers.ranks import on_ranks
from tests.helpers.sides import SIDES
from twinstep.contract.checkpoint.partitions import recut
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

Twins = partial(AnyTwins, "BF16Optimizer")
BOTH = pytest.mark.parametrize("side", SIDES)
MASTERS = "single_partition_of_fp32_groups"


@BOTH
def test_an_entry_that_one_rank_refuses_is_loaded_by_none(side: str) -> None:
    def run(group: dist.ProcessGroup | None) -> tuple[str, bool]:
        assert group is not None
        params, optimizer = built(side, dp_process_group=group)
        trained(params, optimizer, range(1))
        entry = optimizer.state_dict()
        trained(params, optimizer, range(1, 2))
        before = seen(params, optimizer)
        bad = {**entry, MASTERS: [flat[:-1] for flat in entry[MASTERS]]}
        entries: list[Any] = [None, None]
        entries[group.rank()] = bad if group.rank() == 1 else entry
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared below
            optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        same = seen(params, optimizer) == before
        entries[group.rank()] = entry
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        changed = seen(params, optimizer) != before
        return str(caught.value), same and changed

    (first, kept), (second, also) = on_ranks(2, run)
    assert kept
    assert also
    assert "another" in first
    assert "should have" in second


@pytest.mark.parametrize(
    ("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2)]
)
@pytest.mark.parametrize(
    ("side", "other"), [("fast", "reference"), ("reference", "fast"), ("reference", "reference")]
)
def test_a_run_resumes_bit_for_bit_on_another_side_and_number_of_ranks(
    side: str, other: str, before: int, after: int
) -> None:
    def saving(group: dist.ProcessGroup | None) -> Any:
        params, optimizer = built(side, dp_process_group=group)
        trained(params, optimizer, range(2))
        return optimizer.state_dict()

    def whole(group: dist.ProcessGroup | None) -> list[object]:
        params, optimizer = built("reference", dp_process_group=group)
        trained(params, optimizer, range(4))
        return seen(params, optimizer)

    entries = on_ranks(before, saving)

    def resuming(group: dist.ProcessGroup | None) -> list[object]:
        params, optimizer = built(other, dp_process_group=group)
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        trained(params, optimizer, range(2, 4))
        return seen(params, optimizer)

    (wanted,) = on_ranks(1, whole)
    assert on_ranks(after, resuming) == [wanted] * after


@pytest.mark.parametrize("keep", [False, True])
def test_without_fp32_weights_masters_come_from_the_model(keep: bool) -> None:
    twins = Twins(compat={"keep_masters_on_load": keep})
    twins.backward(0)
    twins.step()
    for optimizer, _ in twins.both():
        optimizer.load_state_dict([optimizer.state_dict()], load_optimizer_states=keep)
    twins.check()


@pytest.mark.parametrize("source", SIDES)
def test_entries_of_two_ranks_are_joined_for_one(source: str) -> None:
    twins = Twins([[(7,), (5, 3)]])
    twins.backward(0)
    twins.step()
    whole = getattr(twins, source).state_dict()
    size = 12  # two ranks pad 22 elements to 24
    entries = []
    for rank in range(2):
        entry = {**whole, "partition_count": [2], "partition_rank": [rank]}
        place = slice(rank * size, (rank + 1) * size)
        flat = whole[MASTERS][0]
        padded = torch.cat([flat, torch.zeros(2)])
        entry[MASTERS] = [padded[place]]
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


def other_step(inner: dict[int, Any]) -> None:
    inner[0]["step"] = inner[0]["step"] + 1


def other_group(inner: dict[int, Any]) -> None:
    del inner[0]


def other_names(inner: dict[int, Any]) -> None:
    del inner[0]["exp_avg"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_step, r"entries have steps \[1, 2\], but should agree"),
        (other_group, "entries have states of different groups, but should agree"),
        (other_names, r"entries have different states, but should have the same \[group 0"),
    ],
)
@BOTH
def test_entries_that_do_not_belong_together_are_refused(
    side: str, change: Callable[[dict[int, Any]], None], sentence: str
) -> None:
    def saving(group: dist.ProcessGroup | None) -> Any:
        params, optimizer = built(side, dp_process_group=group)
        trained(params, optimizer, range(1))
        return optimizer.state_dict()

    entries = on_ranks(2, saving)
    change(entries[1]["base_optimizer_state"]["state"])
    params, optimizer = built(side)
    trained(params, optimizer, range(1))
    before = seen(params, optimizer)
    with pytest.raises(ValueError, match=sentence):
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
    assert seen(params, optimizer) == before


@BOTH
def test_a_whole_weight_is_written_where_its_parameter_lies(side: str) -> None:
    _, optimizer = built(side)
    names = list(optimizer.param_slice_mappings[-1])[:2]
    first, value = (optimizer.get_full_hp_param(name) for name in names)
    optimizer.set_full_hp_param(names[1], value + 1.0)
    assert torch.equal(optimizer.get_full_hp_param(names[1]), value + 1.0)
    assert torch.equal(optimizer.get_full_hp_param(names[0]), first)


def test_padding_that_was_saved_is_not_loaded() -> None:
    group: Any = SimpleNamespace(numel=3, partition_size=2, world=2, rank=1)
    assert recut(group, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 9.0])]).tolist() == [3.0, 0.0]
