"""Mistakes of BF16Optimizer about partitions are noticed; each was shipped by some project."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import twinstep.contract.checkpoint.partitions
import twinstep.fast.optimizers.bf16
import twinstep.fast.optimizers.bf16_groups
from tests.helpers.mesh import Mesh, on_mesh
from tests.helpers.partitions import BRAIN, built, seen, trained
from tests.helpers.ranks import on_ranks
from twinstep.fast.optimizers.bf16 import BF16Optimizer
from twinstep.fast.optimizers.bf16_groups import PartitionedGroup
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = pytest.mark.usefixtures("replay")

# The first group is smaller than the world: the second and the third rank own nothing of it.
SIZES = (1, 0, 3, 6)
OPTIONS: dict[str, Any] = {"sizes": SIZES, "clip_grad": 0.5, "allgather_bucket_size": 4}
LAY_OUT, LAID_OUT = twinstep.fast.optimizers.bf16_groups.partitioned_group, BF16Optimizer._laid_out
LOAD = BF16Optimizer.load_state_dict


def words(value: Any) -> object:
    """A state dict with tensors as dtype and bits."""
    if isinstance(value, Tensor):
        return str(value.dtype) if value.dim() else "", bits(value.reshape(-1).float())
    if isinstance(value, dict):
        return {key: words(inside) for key, inside in value.items()}
    return [words(inside) for inside in value] if isinstance(value, list | tuple) else value


def begun(side: str) -> list[tuple[object, Any]]:
    """Observation after two steps on three ranks, and what they save."""

    def run(group: dist.ProcessGroup | None) -> tuple[object, Any]:
        params, optimizer = built(side, dp_process_group=group, **OPTIONS)
        trained(params, optimizer, range(2))
        return seen(params, optimizer), optimizer.state_dict()

    return on_ranks(3, run)


def saved(side: str) -> list[object]:
    """The same as words."""
    return [(row, words(entry)) for row, entry in begun(side)]


def resumed(side: str) -> list[object]:
    """That, and a third step on two ranks."""
    first = begun(side)
    entries = [entry for _, entry in first]

    def ended(group: dist.ProcessGroup | None) -> object:
        params, optimizer = built(side, dp_process_group=group, **OPTIONS)
        optimizer.load_state_dict(entries, load_from_fp32_weights=True)
        loaded = seen(params, optimizer)
        trained(params, optimizer, range(2, 3))
        return loaded, seen(params, optimizer)

    return [[row for row, _ in first], words(entries), on_ranks(2, ended)]


def crossed(side: str) -> list[object]:
    """Groups that are split over other ranks, among which this rank has another number."""

    def marks(params: list[Any]) -> None:
        for param in params[2:]:
            param.allreduce, param.group_name = False, "ep"

    def run(mesh: Mesh) -> object:
        options: dict[str, Any] = {"dp_process_group": mesh.column, "marks": marks}
        options |= {"has_moe_layers": True, "second": {"moe": True, "name": "ep"}}
        options |= {"expert_groups": {"ep": mesh.column}, "expert_data_groups": {"ep": mesh.row}}
        params, optimizer = built(side, **options)
        trained(params, optimizer, range(2))
        return seen(params, optimizer)

    return list(on_mesh(2, 2, run))


def followed(side: str) -> list[object]:
    """Two ranks whose models have been loaded, and whose masters follow them."""

    def run(group: dist.ProcessGroup | None) -> object:
        params, optimizer = built(side, dp_process_group=group)
        entries = [optimizer.state_dict() for _ in range(2)]
        for place, param in enumerate(params):
            param.data.copy_(moderate(param.numel(), 70 + place, BRAIN))
        optimizer.load_state_dict(entries)
        masters = [optimizer.get_full_hp_param(f"p{place}") for place in range(len(params))]
        return [words(tensor.detach()) for tensor in (*params, *masters)]

    return on_ranks(2, run)


RUNS: dict[str, Callable[[str], list[object]]] = {
    "saved": saved,
    "resumed": resumed,
    "crossed": crossed,
    "followed": followed,
}


@cache
def wanted(name: str) -> list[object]:
    """Behaviour of the reference."""
    return RUNS[name]("reference")


@pytest.mark.parametrize("name", RUNS)
def test_without_a_mistake_both_sides_agree(name: str) -> None:
    assert RUNS[name]("fast") == wanted(name)


def padding_of_the_last_rank(group: PartitionedGroup) -> int:
    """G04: all padding lies on the last rank."""
    total = group.flat.numel() - group.numel
    return total if group.rank == group.world - 1 else 0


def padding_of_a_dtype(*given: Any, **named: Any) -> PartitionedGroup:
    """G17: a rank that owns no element of a group takes the dtype of a model."""
    group = LAY_OUT(*given, **named)
    if not group.fragments:
        group.master = group.master.detach().to(BRAIN).requires_grad_()
    return group


def outer_rank(self: BF16Optimizer, *given: Any) -> list[PartitionedGroup]:
    """G07: this rank's number in the first group is its number in all."""
    groups = LAID_OUT(self, *given)
    for group in groups:
        group.rank = groups[0].rank
    return groups


def own_part_cleared(self: BF16Optimizer) -> None:
    """G19: gradients of other ranks' partitions stay."""
    for group in self.groups:
        group.own(group.accumulator).zero_()
        group.has_gradient = [False for _ in group.params]


def gathered_first(self: BF16Optimizer, *given: Any, **named: Any) -> None:
    """H20: model weights are brought together before the load has ended."""
    self.update_lp_params()
    LOAD(self, *given, **named)


def cut_at_the_world(group: PartitionedGroup, pieces: list[Tensor]) -> Tensor:
    """H02: partitions begin where they would if each rank's share were not rounded up."""
    size = -(-group.numel // group.world)
    part = torch.cat([piece.reshape(-1) for piece in pieces])[: group.numel]
    part = part[group.rank * size : (group.rank + 1) * size][: group.partition_size]
    return torch.cat([part, part.new_zeros(group.partition_size - part.numel())])


@pytest.mark.parametrize(
    ("home", "name", "wrong", "run"),
    [
        (PartitionedGroup, "padding", property(padding_of_the_last_rank), "resumed"),
        (twinstep.fast.optimizers.bf16, "partitioned_group", padding_of_a_dtype, "saved"),
        (BF16Optimizer, "_laid_out", outer_rank, "crossed"),
        (BF16Optimizer, "clear_hp_grads", own_part_cleared, "resumed"),
        (twinstep.fast.optimizers.bf16_groups, "UNIT", 1, "resumed"),
        (twinstep.contract.checkpoint.partitions, "recut", cut_at_the_world, "resumed"),
        (BF16Optimizer, "load_state_dict", gathered_first, "followed"),
    ],
    ids=[
        "padding only on the last rank",
        "dtype of an empty partition",
        "partition of the outer loop",
        "gradients of others not cleared",
        "odd shards",
        "alignment differs on load",
        "gathered before the load",
    ],
)
def test_a_mistake_about_partitions_is_noticed(
    home: Any, name: str, wrong: Any, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G04, G07, G17, G19, G28, H02 and H20 of docs/reference/bugs.md."""
    right = wanted(run)
    monkeypatch.setattr(home, name, wrong)
    assert RUNS[run]("fast") != right
