"""All ranks or none: what one rank cannot do, no rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from twinstep.reference.collectives import largest

T = TypeVar("T")


def on_all_ranks(read: Callable[[], T], groups: Iterable[dist.ProcessGroup | None]) -> T:
    """What `read` returns, if it does so on every rank.

    A rank that stopped alone would leave the others waiting in their next collective for ever.

    Args:
        read: changes nothing; may raise ValueError.
        groups: whose ranks have to agree, each once; every rank names them in the same order.

    Raises:
        ValueError: that of `read`, or another rank has had one.
    """
    failure: ValueError | None = None
    try:
        result = read()
    except ValueError as error:
        failure = error
    asked = [group for group in dict.fromkeys(groups) if group is not None]
    anywhere = bool(largest(torch.tensor(float(failure is not None)), asked))
    if failure is not None:
        raise failure
    if anywhere:
        raise ValueError("state does not fit another rank, which says why; it should fit all")
    return result
