"""The two sides of a step: who answers a call, and where.

The reference always runs on the CPU. The fast side runs on the GPU where there is one; elsewhere
its compiled kernels are replayed on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from twinstep.parity.registry.engines import Engine, engine_named, running
from twinstep.scenarios.calls import Answer, fast_answer, reference_answer

SIDES = ("reference", "fast")


def engine() -> Engine:
    """Where the fast side runs on this machine: the GPU, or replay."""
    gpu = engine_named("cuda")
    return engine_named("replay") if gpu.missing else gpu


@contextmanager
def fast_side() -> Iterator[Answer]:
    """Make the fast side answer for the length of a `with` block."""
    place = engine()
    with running(place):
        yield partial(fast_answer, device=place.device)


@contextmanager
def answer_of(side: str) -> Iterator[Answer]:
    """The answers of one side, by name.

    Raises:
        ValueError: there is no side of that name.
    """
    require_side(side)
    if side == "reference":
        yield reference_answer
        return
    with fast_side() as answer:
        yield answer


@contextmanager
def device_of(side: str) -> Iterator[torch.device]:
    """Where the optimizer classes of one side step, for the length of a `with` block.

    Raises:
        ValueError: there is no side of that name.
    """
    require_side(side)
    if side == "reference":
        yield torch.device("cpu")
        return
    place = engine()
    with running(place):
        yield place.device


def require_side(side: str) -> None:
    """Refuse a side that there is not.

    Raises:
        ValueError: there is no side of that name.
    """
    if side not in SIDES:
        raise ValueError(f"side={side!r}, but should be one of {SIDES} [twinstep.scenarios.sides]")
