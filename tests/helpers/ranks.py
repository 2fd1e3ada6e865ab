"""Optimizers of data-parallel ranks, on simulated process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from twinstep.parity.ranks.world import World

T = TypeVar("T")


def on_ranks(count: int, run: Callable[[dist.ProcessGroup | None], T]) -> list[T]:
    """Run a function on every rank; a rank that is alone has no group."""
    if count == 1:
        return [run(None)]
    return World(count, seed=count, order="ring").run(lambda rank: run(rank.group("data")))
