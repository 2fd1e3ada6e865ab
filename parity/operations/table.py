"""Every operation there is: the house's, one row each, and those that users bring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from twinstep.parity.operations import buffers, lamb_steps, scales, steps
from twinstep.parity.operations.operation import Operation
from twinstep.parity.records.errors import UsageError

HOUSE = (
    steps.SGD_STEP,
    steps.ADAM_STEP,
    steps.ADAMW_STEP,
    steps.ADAMW_REMAINDER_STEP,
    lamb_steps.LAMB_STEP,
    lamb_steps.APEX_LAMB_STEP,
    buffers.UNSCALE,
    buffers.GLOBAL_NORM,
    scales.CLIP_FACTOR,
    scales.CLIP_COEFFICIENT,
    scales.UPDATE_SCALE_DYNAMIC,
    scales.UPDATE_SCALE_WRAPPER,
    scales.UPDATE_SCALE_TORCH,
    buffers.FLATTEN,
    buffers.UNFLATTEN,
    buffers.ACCUMULATE,
    buffers.CAST_COPY,
    steps.MIXED_STEP,
)
_known: dict[str, Operation] = {row.name: row for row in HOUSE}


def operations() -> tuple[Operation, ...]:
    """Every known operation, the house's first."""
    return tuple(_known.values())


def operation_named(name: str, where: str, accepts: tuple[str, ...] = ()) -> Operation:
    """The operation of that name, for a kernel that accepts these deviations.

    Raises:
        UsageError: there is none; the sentence lists those there are.
    """
    if name not in _known:
        raise UsageError(
            f'operation "{name}" is unknown, but should be one of {", ".join(_known)} [{where}]'
        )
    return replace(_known[name], accepts=accepts) if accepts else _known[name]


def add_operation(operation: Operation) -> None:
    """Make an operation known; see `parity.register_operation`.

    Raises:
        UsageError: the name is taken.
    """
    if operation.name in _known:
        raise UsageError(
            f'operation "{operation.name}" exists already, but names should be unique '
            f"[register_operation]"
        )
    _known[operation.name] = operation


@contextlib.contextmanager
def borrowed_operations() -> Iterator[None]:
    """Forget at the end of the block what was added inside it."""
    before = dict(_known)
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)
