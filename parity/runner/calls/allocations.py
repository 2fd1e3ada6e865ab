"""Memory that a kernel allocates without values: filled, and followed until something writes it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinstep.parity.cases.garbage import spoil
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.operations.operation import Role
from twinstep.parity.registry.engines import Engine
from twinstep.parity.runner.calls.places import place_in

if TYPE_CHECKING:
    from twinstep.replay import Unwritten

ALLOCATING = ("empty", "new_empty", "_empty")
GROWING = ("resize_", "resize_as_")


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what torch allocates without values.

    Args:
        garbage: one of `GARBAGE`.
        unwritten: on replay, notes reads of such memory.
    """

    def __init__(self, garbage: str, unwritten: Unwritten | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.garbage = garbage
        self.unwritten = unwritten
        self.places: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler inside the first call, seconds of its limit."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled functions run compiled, as they do without this mode."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func._schema.name.partition("::")[2]
        target = args[0] if args and name in GROWING else None
        held = target.untyped_storage().nbytes() if isinstance(target, Tensor) else 0
        result = func(*args, **(kwargs or {}))
        if name in GROWING or name.startswith(ALLOCATING):
            # Compilers trace with tensors that have no memory.
            if type(result) is Tensor and result.layout is torch.strided and not result.is_meta:
                self._allocated(result, held)
        elif self.unwritten is not None:
            for argument, value in [
                *zip(func._schema.arguments, args, strict=False),
                *((a, (kwargs or {}).get(a.name)) for a in func._schema.arguments[len(args) :]),
            ]:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._written(value if isinstance(value, list | tuple) else [value])
        return result

    def _allocated(self, tensor: Tensor, held: int) -> None:
        if tensor.untyped_storage().nbytes() <= held:
            return
        spoil(tensor, self.garbage, held)
        self.places.append(place_in(sys._getframe(2)))
        if self.unwritten is not None and not held:
            self.unwritten.add(tensor)

    def _written(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, Tensor) and self.unwritten is not None:
                self.unwritten.written(value)

    @property
    def remark(self) -> str:
        """The first read of such memory, or the first line that allocated some; or nothing."""
        if self.unwritten is not None and self.unwritten.reads:
            return f": {self.unwritten.reads[0]}"
        return f"; torch allocates some without values{self.places[0]}" if self.places else ""


@contextlib.contextmanager
def allocations(
    garbage: str, memory: GuardedMemory, engine: Engine
) -> Iterator[Allocations | None]:
    """Fill what is allocated inside the block; nothing is done where no garbage is asked for."""
    if not garbage:
        yield None
        return
    with Allocations(garbage, _followed(memory, engine)) as mode:
        yield mode


def _followed(memory: GuardedMemory, engine: Engine) -> Unwritten | None:
    """On replay, the tensors of a call that are only written."""
    if engine.name != "replay":
        return None
    from twinstep.replay import Unwritten

    operation = memory.case.operation
    names = {*operation.lists_of(Role.OUTPUT), *(c.name for c in operation.controls if c.output)}
    outputs = [span.of(memory.block) for span in memory.spans if span.name in names]
    return Unwritten(outputs, raises=False)
