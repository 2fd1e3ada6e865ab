"""Collectives over groups of ranks.

A collective over no group is the identity, so that one rank needs no process group at all.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Engine, Groups, ModelParallelUnit


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
