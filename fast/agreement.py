"""All ranks or none: a state that one rank refuses is refused by all."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from twinstep.fast.bf16_groups import PartitionedGroup

T = TypeVar("T")


def everywhere(check: Callable[[], T], groups: Sequence[PartitionedGroup]) -> T:
    """Return what `check` returns, once all ranks that share a group have come so far.

    Otherwise those whose state fits would wait in a gather for one that has given up. Waits for the
    device where there are ranks.

    Args:
        check: changes nothing.
        groups: in the same order on every rank.

    Raises:
        ValueError: from `check`, here or on another rank.
    """
    found: list[T] = []
    said: list[ValueError] = []
    try:
        found.append(check())
    except ValueError as error:
        said.append(error)
    known: list[dist.ProcessGroup] = []
    for group in groups:
        if group.process_group is not None and group.process_group not in known:
            known.append(group.process_group)
    if known:
        refusals = torch.full((), float(len(said)), device=groups[0].flat.device)
        for process_group in known:
            dist.all_reduce(refusals, op=dist.ReduceOp.MAX, group=process_group)
        if not said and refusals.item() > 0.0:
            said.append(ValueError("state should fit every rank, but another one refuses its own"))
    if said:
        raise said[0]
    return found[0]
