"""Parameters that torch splits over ranks: stepped in parts by FusedAdam, refused by the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.sides import CLASSES, SIDES

pytestmark = pytest.mark.usefixtures("replay")


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One rank that is a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_fully_sharded_models_are_stepped_with_the_bits_of_whole_ones(mesh: Any) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    ends = []
    for side in SIDES:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        sharded = copy.deepcopy(whole)
        fully_shard(sharded, mesh=mesh)
        runs = []
        for model in (whole, sharded):
            runs.append((model, CLASSES[side]["FusedAdam"](model.parameters(), 0.1)))
        for step in range(3):
            for model, optimizer in runs:
                optimizer.zero_grad()
                model(torch.full((2, 3), step + 1.0)).pow(2).sum().backward()
                optimizer.step()
            saved = get_optimizer_state_dict(sharded, runs[1][1])
            set_optimizer_state_dict(sharded, runs[1][1], saved)
        for one, part in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert isinstance(part, DTensor)
            assert torch.equal(part.full_tensor(), one)
            ends.append(one.detach())
    half = len(ends) // 2
    assert all(map(torch.equal, ends[:half], ends[half:]))


@pytest.mark.parametrize("side", SIDES)
def test_what_cannot_step_parts_refuses_them_by_name(side: str, mesh: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    home = CLASSES[side]
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="parameter is a DTensor, but should be whole.*FusedLamb"):
        home["FusedLamb"]([param])
    for name in ("FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer", "ZeroOptimizer"):
        options = {"param_names": {param: "p"}} if name[0] in "BZ" else {}
        with pytest.raises(ValueError, match=f"parameter is a DTensor, but should.*{name}"):
            home[name](home["FusedAdam"]([param]), **options)
    optimizer = home["FusedAdam"]([param])
    param.grad = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="gradient is placed .*Replicate.* but should be as its"):
        optimizer.step()
    assert not optimizer.state
    whole: Any = param.detach()
    partial = whole.redistribute(placements=[Replicate()])
    partial._spec.placements = (Partial(),)
    with pytest.raises(ValueError, match="but should not be partial"):
        home["FusedAdam"]([partial])
