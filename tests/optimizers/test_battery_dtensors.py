"""Tensors around others: DTensors, which FusedAdam steps in parts, and what collectives bring."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.sides import CLASSES, SIDES
from twinstep.contract.shards import local_of
from twinstep.fast.runtime import reader, watch

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


@pytest.mark.parametrize("compiled", [True, False])
def test_long_lists_of_parts_are_stepped_with_the_bits_of_whole_ones(
    mesh: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    if not compiled:
        monkeypatch.setattr(reader, "library", lambda: None)
        monkeypatch.setattr(watch, "library", lambda: None)
    values = torch.arange(4.0 * reader.LONG).split(4)
    whole = [nn.Parameter(value.clone()) for value in values]
    parts = [nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)])) for value in values]
    runs = [(params, CLASSES["fast"]["FusedAdam"](params, 0.1)) for params in (whole, parts)]
    for step in range(4):
        for params, optimizer in runs:
            if step == 3:
                own = local_of(params[5])
                own.data = own.data.clone() * 2.0
            for index, param in enumerate(params):
                param.grad = None if step == 2 and index == 7 else param.detach() * (step - 1.5)
            optimizer.step()
    for one, part in zip(whole, parts, strict=True):
        assert torch.equal(part.full_tensor(), one)  # type: ignore[attr-defined]


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


WRAPPED = ("FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer", "ZeroOptimizer")


def _made(home: dict[str, Any], name: str, param: torch.Tensor) -> Any:
    if name not in WRAPPED:
        return home[name]([param], 0.1)
    options = {"param_names": {param: "p"}} if name[0] in "BZ" else {}
    return home[name](home["FusedAdam"]([param], 0.1), **options)


def _stepped(optimizer: Any, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    param.grad = grad
    if hasattr(optimizer, "update_hp_grads"):
        optimizer.update_hp_grads()
    if hasattr(optimizer, "reduce_gradients"):
        optimizer.reduce_gradients()
    optimizer.step()
    return param.detach().clone()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLamb", *WRAPPED])
@pytest.mark.parametrize("side", SIDES)
def test_gradients_that_a_collective_brings_are_waited_for(side: str, name: str, mesh: Any) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    dtype = torch.bfloat16 if name in WRAPPED else torch.float32
    ends = []
    for late in (False, True):
        param = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = _made(CLASSES[side], name, param)
        for step in range(3):
            grad = torch.arange(4, dtype=dtype) + step
            # The second one is plain: a plan of the first step meets another gradient, and back.
            if late and step != 1:
                grad = all_reduce(grad, "sum", mesh)
                assert isinstance(grad, AsyncCollectiveTensor)
            ends.append(_stepped(optimizer, param, grad))
    assert all(map(torch.equal, ends[:3], ends[3:]))
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLamb", *WRAPPED])
@pytest.mark.parametrize("side", SIDES)
def test_tensors_without_memory_of_their_own_are_refused(side: str, name: str, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.two_tensor import TwoTensor

    around = TwoTensor(torch.ones(4), torch.ones(4))
    match = "is a {}, but should have memory of its own"
    with pytest.raises(ValueError, match=f"parameter {match.format('TwoTensor')}"):
        _made(CLASSES[side], name, nn.Parameter(around))
    param = nn.Parameter(torch.ones(4))
    optimizer = _made(CLASSES[side], name, param)
    first = _stepped(optimizer, param, torch.ones(4))
    for grad in (around, distribute_tensor(torch.ones(4), mesh, [Shard(0)])):
        with pytest.raises(
            RuntimeError, match=f"gradient {match.format(type(grad).__name__)}.*{name}"
        ):
            _stepped(optimizer, param, grad)
    assert torch.equal(param, first)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("side", SIDES)
def test_parts_of_flat_parameters_are_stepped_or_refused_by_name(
    side: str, original: bool, mesh: Any
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    home = CLASSES[side]
    torch.manual_seed(0)
    whole = nn.Linear(3, 2)
    model = FullyShardedDataParallel(
        copy.deepcopy(whole), device_id=torch.device("cpu"), use_orig_params=original
    )
    for name in ("FusedLamb", "FusedLAMB", *WRAPPED):
        options = {}
        if name[0] in "BZ":
            options = {"param_names": {p: key for key, p in model.named_parameters()}}
        params: Any = model.parameters()
        given = home["FusedAdam"](params) if name in WRAPPED else params
        with pytest.raises(ValueError, match=f"parameter is a part that .*Parallel.*{name}"):
            home[name](given, **options)
    for one in (whole, model):
        optimizer = home["FusedAdam"](one.parameters(), 0.1)
        one(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        assert all(map(torch.equal, whole.parameters(), model.parameters()))


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("side", SIDES)
def test_wrappers_have_no_state_by_name(side: str, name: str, mesh: Any) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = nn.Linear(2, 1, bias=False).bfloat16()
    optimizer = _made(CLASSES[side], name, model.weight)
    optimizer.backward(model(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    for use in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(RuntimeError, match=f"asked for by names of .* state_dict.*{name}"):
            use()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    optimizer.step()
    assert optimizer.get_global_norm() > 0
