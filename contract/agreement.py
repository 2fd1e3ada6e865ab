"""All ranks or none: what one rank cannot do, no rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def on_all_ranks(
    read: Callable[[], T], groups: Iterable[dist.ProcessGroup | None], device: torch.device
) -> T:
    """Return what `read` returns, if it does so on every rank; with groups, waits for the device.

    A rank that stopped alone would leave the others waiting in their next collective for ever.

    Args:
        read: changes nothing; may raise ValueError.
        groups: of the ranks that must agree; every rank names them in the same order.
        device: that the groups communicate from.

    Raises:
        ValueError: that of `read`, or another rank has had one.
    """
    failure: ValueError | None = None
    try:
        result = read()
    except ValueError as error:
        failure = error
    asked = [group for group in dict.fromkeys(groups) if group is not None]
    refusals = torch.full((), float(failure is not None), device=device)
    for group in asked:
        dist.all_reduce(refusals, op=dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    if asked and refusals.item():
        raise ValueError(
            "state does not fit another rank, which names the reason; it should fit all"
        )
    return result
