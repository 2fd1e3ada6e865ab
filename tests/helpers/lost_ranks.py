"""Ranks of `scenarios.processes.launch` that fail in one way or another."""

from __future__ import annotations

import os
import signal

import torch

from tests.helpers.waiting import limit_collectives
from twinstep.scenarios.processes import RankRefused
from twinstep.scenarios.ranks import Ranks


def add_up(ranks: Ranks) -> None:
    """Two collectives, one of them long."""
    for size in (1, 1_000_000):
        tensor = torch.full((size,), float(ranks.number))
        ranks.add_([tensor])
        assert float(tensor[-1]) == sum(range(ranks.count))


def is_killed(ranks: Ranks) -> None:
    """Rank 1 is ended by a signal."""
    if ranks.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add_up(ranks)


def is_stopped(ranks: Ranks) -> None:
    """Rank 1 does nothing any more, and is still there; the others wait for it for 2 s."""
    add_up(ranks)
    limit_collectives(2.0)
    if ranks.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    add_up(ranks)


def refuses(ranks: Ranks) -> None:
    """Rank 1 refuses alone."""
    if ranks.number == 1:
        raise RankRefused("its file is not there")
    add_up(ranks)


def fails(ranks: Ranks) -> None:
    """Rank 1 has an error of its own."""
    if ranks.number == 1:
        raise KeyError("a defect")
    add_up(ranks)


def ends_early(ranks: Ranks) -> None:
    """Rank 1 leaves out what the others wait for."""
    if ranks.number != 1:
        add_up(ranks)
