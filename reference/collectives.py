"""Groups of ranks: who adds up what, and which gradients are the same on several ranks.

A collective over no group is the identity, so that one rank needs no process group at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Groups = Sequence[dist.ProcessGroup]


class ModelParallelUnit(Protocol):
    """What a model-parallel unit (`mpu`) has to offer.

    One of `get_tensor_model_parallel_rank`, `get_slice_parallel_rank` and
    `get_model_parallel_rank`, the first that exists, is this rank's place in its tensor-parallel
    group.
    """

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold one model together."""

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model."""


class Engine(Protocol):
    """What an engine handle has to offer."""

    enable_backward_allreduce: bool


def tensor_parallel_rank(mpu: ModelParallelUnit | None) -> int:
    """This rank's place in its tensor-parallel group; 0 without a unit."""
    if mpu is None:
        return 0
    names = (
        "get_tensor_model_parallel_rank",
        "get_slice_parallel_rank",
        "get_model_parallel_rank",
    )
    getter = next(getattr(mpu, name) for name in names if hasattr(mpu, name))
    return int(getter())


def counted_once(param: Tensor, tensor_rank: int) -> bool:
    """Whether this rank's gradient of the parameter counts in a norm over the model.

    Not a replica of a pipeline stage (`ds_pipe_replicated`), and, on tensor-parallel ranks after
    the first, only what is split over them (`model_parallel` or `tensor_model_parallel`).
    """
    if getattr(param, "ds_pipe_replicated", False):
        return False
    split = getattr(param, "model_parallel", False) or getattr(
        param, "tensor_model_parallel", False
    )
    return tensor_rank == 0 or bool(split)


def reduced(tensor: Tensor, groups: Groups, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """The tensor reduced over each group in turn; a new tensor."""
    result = tensor.clone()
    for group in groups:
        dist.all_reduce(result, op=operation, group=group)
    return result


def summed(tensor: Tensor, groups: Groups) -> Tensor:
    """The sum over each group in turn."""
    return reduced(tensor, groups, dist.ReduceOp.SUM)


def largest(tensor: Tensor, groups: Groups) -> Tensor:
    """The maximum over each group in turn."""
    return reduced(tensor, groups, dist.ReduceOp.MAX)


def overflow_groups(
    mpu: ModelParallelUnit | None, engine: Engine | None, expert_groups: Groups
) -> list[dist.ProcessGroup]:
    """Over whom an overflow is agreed, in order.

    Experts differ from rank to rank, so all their groups come first. Gradients of everything else
    are the same on all data-parallel ranks once they are reduced; where the engine does not reduce
    them in backward, those ranks are asked too.
    """
    groups = list(expert_groups)
    local = engine is not None and not engine.enable_backward_allreduce
    if mpu is not None:
        groups += [mpu.get_data_parallel_group()] if local else []
        groups.append(mpu.get_model_parallel_group())
    elif local:
        world = dist.group.WORLD
        groups += [] if world is None else [world]
    return groups
