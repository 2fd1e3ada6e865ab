"""Collectives over groups of ranks.

A collective over no group is the identity, so that one rank needs no process group at all.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Groups


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
