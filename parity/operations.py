"""Every operation there is: the house's, one row each, and those that users bring.

`python -m parity.operations` prints `docs/operations.md`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from parity import operations_buffer, operations_scale, operations_step
from parity.errors import UsageError
from parity.operation import Operation

HOUSE = (
    operations_step.SGD_STEP,
    operations_step.ADAM_STEP,
    operations_step.ADAMW_STEP,
    operations_step.LAMB_STEP,
    operations_buffer.UNSCALE,
    operations_buffer.GLOBAL_NORM,
    operations_scale.CLIP_FACTOR,
    operations_scale.CLIP_COEFFICIENT,
    operations_scale.UPDATE_SCALE_DYNAMIC,
    operations_scale.UPDATE_SCALE_WRAPPER,
    operations_scale.UPDATE_SCALE_TORCH,
    operations_buffer.FLATTEN,
    operations_buffer.UNFLATTEN,
    operations_buffer.ACCUMULATE,
    operations_buffer.CAST_COPY,
    operations_step.MIXED_STEP,
)
_known: dict[str, Operation] = {row.name: row for row in HOUSE}


def operations() -> tuple[Operation, ...]:
    """Every known operation, the house's first."""
    return tuple(_known.values())


def operation_named(name: str, where: str) -> Operation:
    """The operation of that name.

    Raises:
        UsageError: there is none; the sentence lists those there are.
    """
    if name not in _known:
        raise UsageError(
            f'operation "{name}" is unknown, but should be one of {", ".join(_known)} [{where}]'
        )
    return _known[name]


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


if __name__ == "__main__":
    from parity.operations_page import render

    sys.stdout.write(render())
