"""Settings of launches, and the memory that they may touch besides their arguments."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from twinstep.replay.checks.uninitialised import Unwritten
from twinstep.replay.machine.memory import Extents
from twinstep.replay.machine.program import Program
from twinstep.replay.machine.watchdog import PATIENCE

Labelled = tuple[str, torch.Tensor]
Provider = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Options:
    """Settings of launches.

    Attributes:
        check_races: Report two threads that touch the same bytes, one writing, without order.
        shake_sums: With `check_races`, move floating sums of atomics whose bits another order of
            threads would change by a few units of their last place (see `checks.sums`).
        check_arithmetic: Report integers divided by zero, and NaNs made of numbers (not inside
            `shadow64.lift.lifting`).
        unwritten: Bytes that were never written; reading one is an error, or noted there.
        garbage: The byte that fills shared and local memory before anything is written there.
        strict_provenance: An access may reach no other tensor than the one that its address was
            computed from, and no byte between the elements of a strided view. The kernel is given
            other addresses than the real ones (not inside `shadow64.lift.lifting`).
        order: "natural", "backwards", or "permuted" to run blocks in a shuffled order.
        seed: Of the shuffle.
        together: How many blocks run together, one batch after the other; 0 to choose.
        only_blocks: Linear indices of the blocks to run, or None for all.
        only_ends: How many blocks to run at either end of every axis of the grid, or None for all.
        and_middle: Run as many on either side of the middle of every axis, too.
        and_parts: Run those parts of a row of blocks, too: where each starts and stops, from 0 to
            1. Grids of more than one axis run none of them.
        max_steps: Steps that a batch may make.
        patience: Seconds of processor time that a batch may take without getting on: without
            finishing a thread or touching other memory (see `machine.watchdog`).
        after_batch: Called whenever some blocks have run.
    """

    check_races: bool = False
    shake_sums: bool = False
    check_arithmetic: bool = False
    unwritten: Unwritten | None = None
    garbage: int = 0xCD
    strict_provenance: bool = False
    order: str = "natural"
    seed: int = 0
    together: int = 0
    only_blocks: tuple[int, ...] | None = None
    only_ends: int | None = None
    and_middle: bool = False
    and_parts: tuple[tuple[float, float], ...] = ()
    max_steps: float = math.inf
    patience: float = PATIENCE
    after_batch: Callable[[], None] | None = None


_DEFAULTS = Options()
OPTIONS: ContextVar[Options] = ContextVar("replay options", default=_DEFAULTS)
_NOTHING = Extents()
_ALLOWED: ContextVar[Extents] = ContextVar("replay allowed", default=_NOTHING)
_PROVIDERS: list[Provider] = []
_LOCK = threading.Lock()
TRANSLATION: ContextVar[Callable[[Program], Program] | None] = ContextVar(
    "replay translation", default=None
)
"""Gives the program to run in place of another, inside `replay.shadow64.lift.lifting`."""
TUNING: ContextVar[bool] = ContextVar("replay tuning", default=False)
"""Whether an autotuner makes the launches, on arguments that it does not restore."""


@contextmanager
def options(
    *,
    check_races: bool = False,
    shake_sums: bool = False,
    check_arithmetic: bool = False,
    uninitialised: Iterable[torch.Tensor] | Unwritten | None = None,
    garbage: int = 0xCD,
    strict_provenance: bool = False,
    order: str = "natural",
    seed: int = 0,
    together: int = 0,
    only_blocks: Iterable[int] | None = None,
    only_ends: int | None = None,
    and_middle: bool = False,
    and_parts: tuple[tuple[float, float], ...] = (),
    max_steps: float = math.inf,
    patience: float = PATIENCE,
    after_batch: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Run the launches of this thread inside the context with other `Options`.

    Args:
        check_races: See `Options`.
        shake_sums: See `Options`.
        check_arithmetic: See `Options`.
        uninitialised: Tensors of which no byte has been written yet: reading a byte before a
            launch inside this context has written it is an error, in shared memory too (which an
            empty list checks alone). An `Unwritten` may note such reads instead, and grow.
        garbage: See `Options`.
        strict_provenance: See `Options`.
        order: See `Options`.
        seed: See `Options`.
        together: See `Options`.
        only_blocks: See `Options`.
        only_ends: See `Options`.
        and_middle: See `Options`.
        and_parts: See `Options`.
        max_steps: See `Options`.
        patience: See `Options`.
        after_batch: See `Options`.
    """
    if order not in (known := ("natural", "backwards", "permuted")):
        raise ValueError(f"order is {order!r}, but should be one of {', '.join(known)}.")
    chosen = None if only_blocks is None else tuple(only_blocks)
    unwritten = uninitialised
    if not (unwritten is None or isinstance(unwritten, Unwritten)):
        unwritten = Unwritten(unwritten)
    token = OPTIONS.set(
        Options(
            check_races=check_races,
            shake_sums=shake_sums,
            check_arithmetic=check_arithmetic,
            unwritten=unwritten,
            garbage=garbage,
            strict_provenance=strict_provenance,
            order=order,
            seed=seed,
            together=together,
            only_blocks=chosen,
            only_ends=only_ends,
            and_middle=and_middle,
            and_parts=and_parts,
            max_steps=max_steps,
            patience=patience,
            after_batch=after_batch,
        )
    )
    try:
        yield
    finally:
        OPTIONS.reset(token)


@contextmanager
def allow(*tensors: torch.Tensor, **named: torch.Tensor) -> Iterator[None]:
    """Let launches of this thread inside the context touch these tensors as well.

    In records and faults a tensor goes by the name it is given here, besides the kernel's own.
    """
    before = _ALLOWED.get().pairs
    new = [(f"allowed[{len(before) + i}]", t) for i, t in enumerate(tensors)]
    token = _ALLOWED.set(Extents((*before, *new, *named.items())))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def register_buffer_provider(provider: Provider) -> None:
    """Ask a function before every launch for further tensors that kernels may touch.

    For launchers that pass addresses in tables: the function returns the tensors whose addresses
    are in live tables. Registering the same function twice has no effect. A launcher that must not
    import replay finds this function at Triton's active driver.
    """
    with _LOCK:
        if provider not in _PROVIDERS:
            _PROVIDERS.append(provider)


def reachable() -> list[Extents]:
    """Tensors that a launch made now may touch besides its arguments."""
    tables = ((f"table[{i}]", t) for ask in _PROVIDERS for i, t in enumerate(ask()))
    return [_ALLOWED.get(), Extents(tables)]
