"""Cases and their accepted outputs; inside `sharing()` formed once for all kernels of an operation.

Not while a reference is changed: accepted outputs are looked up by what it reads, not by its code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.expected.instruction_error import InstructionError
from twinstep.parity.expected.outputs import AcceptedOutputs, accepted_outputs
from twinstep.parity.operations.operation import Operation

Kept = TypeVar("Kept")
ROOM = 512 << 20


class Formed(Generic[Kept]):
    """Objects by key, the largest forgotten where all would take more than `ROOM` bytes.

    A thousand small tensors take longest to judge and least room. To drop the oldest drops all
    where kernel after kernel asks for the same.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[Kept, int]] = {}

    def once(self, key: object, form: Callable[[], Kept], size: Callable[[Kept], int]) -> Kept:
        """The object of a key: a known one, or one formed now, of this size in bytes."""
        if key in self._known:
            return self._known[key][0]
        found = form()
        self._known[key] = found, size(found)
        while sum(size for _, size in self._known.values()) > ROOM:
            self._known.pop(max(self._known, key=lambda one: self._known[one][1]))
        return found


class Shared:
    """Cases and accepted outputs that were formed already."""

    def __init__(self) -> None:
        self.cases, self.accepted = Formed[Case](), Formed[AcceptedOutputs]()


_SHARED: ContextVar[Shared | None] = ContextVar("what kernels share", default=None)


@contextmanager
def sharing(shared: Shared) -> Iterator[None]:
    """Form inside the context what has not been formed, once."""
    token = _SHARED.set(shared)
    try:
        yield
    finally:
        _SHARED.reset(token)


def share() -> None:
    """Form cases and accepted outputs once in this thread from here on."""
    _SHARED.set(Shared())


def generated(operation: Operation, combination: str, recipe: Recipe) -> Case:
    """`generate`, which a case's kernels share as the laws of one kernel do."""
    shared = _SHARED.get()
    if shared is None:
        return generate(operation, combination, recipe)
    # A case holds its operation, so that no other can get this number.
    key = id(operation), combination, repr(recipe)
    return shared.cases.once(
        key,
        lambda: generate(operation, combination, recipe),
        lambda case: sum(tensor.nbytes for tensors in case.lists.values() for tensor in tensors),
    )


def expected(case: Case, arithmetic: str, error: InstructionError) -> AcceptedOutputs:
    """`accepted_outputs`, looked up by everything that it reads."""
    shared = _SHARED.get()
    if shared is None:
        return accepted_outputs(case, arithmetic, error)
    key = _digest(case, arithmetic, error)
    return shared.accepted.once(key, lambda: accepted_outputs(case, arithmetic, error), _size)


def _size(found: AcceptedOutputs) -> int:
    parts = [part for rows in found.values() for row in rows for part in vars(row).values()]
    return sum(part.nbytes for part in parts if part is not None)


def _digest(case: Case, arithmetic: str, error: InstructionError) -> bytes:
    operation = case.operation.name, case.operation.accepts
    plain = (operation, case.combination, case.recipe.period, arithmetic, error)
    digest = hashlib.sha256(repr((plain, sorted(case.options.items()))).encode())
    controls = [(name, [tensor]) for name, tensor in case.controls.items()]
    for name, tensors in (*case.lists.items(), *controls):
        digest.update(name.encode())
        for tensor in tensors:
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(_bytes(tensor))
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    # A tensor of one element may have any stride.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()
