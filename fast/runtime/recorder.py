"""Notes of a step's launches, from which `fast.runtime.repeated` makes those of later steps.

Whoever launches, lays out a table or zeroes memory for a launch tells the recorder of its thread,
if there is one; whoever does anything else that the next step must do again refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from twinstep.fast.runtime.compiled import Known
from twinstep.fast.runtime.lists import FixedTensors, MovingTensors

TensorLists = Sequence[Sequence[Tensor]]
_current: ContextVar[Recorder | None] = ContextVar("recorder of this thread", default=None)


class Moves(Protocol):
    """A table with a row of addresses that moves."""

    def move(self, tensors: MovingTensors) -> None:
        """Write the addresses that the tensors have now."""


@dataclass(frozen=True, eq=False)
class Noted:
    """A launch.

    Attributes:
        call: launches.
        words: its arguments, with None in the places of `alone`.
        alone: place among them, list and slot of a tensor that may move, and whether its address is
            the argument.
        reaches: lists that it reaches through tables.
    """

    call: Callable[..., object]
    words: list[object]
    alone: list[tuple[int, MovingTensors, int, bool]]
    reaches: TensorLists


class Recorder:
    """Launches as they are made.

    Args:
        lists: whose tensors may lie elsewhere at every step.

    Attributes:
        complete: all that was done can be done again.
        launches: in their order.
        tables: that move, each with its list.
        zeros: memory that is zero when the launches begin.
        tensors: arguments that do not move.
        kernels: that were compiled.
        alone: of moving lists with one tensor that is not empty, the list and its slot.
    """

    def __init__(self, lists: TensorLists) -> None:
        self.complete = True
        self.launches: list[Noted] = []
        self.tables: list[tuple[Moves, MovingTensors]] = []
        self.zeros: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.kernels: list[Known] = []
        self._moving = [role for role in lists if isinstance(role, MovingTensors)]
        alone = (role for role in self._moving if len(role.layout.filled) == 1)
        self.alone = [(role, role.layout.filled[0]) for role in alone]

    def _knows(self, role: object) -> bool:
        return any(known is role for known in self._moving)

    def note_launch(
        self,
        call: Callable[..., object],
        words: Sequence[object],
        args: Sequence[object],
        *,
        first: int = 0,
        by_address: bool = False,
        reaches: TensorLists = (),
        kernel: Known | None = None,
    ) -> None:
        """Note that `call(*words)` was made; `args` are the kernel's, from place `first` on."""
        moving = [(role[slot], role, slot) for role, slot in self.alone]
        alone: list[tuple[int, MovingTensors, int, bool]] = []
        kept = list(words)
        for place, arg in enumerate(args, start=first):
            found = next((each[1:] for each in moving if each[0] is arg), None)
            if found is not None:
                alone.append((place, *found, by_address))
                kept[place] = None  # a gradient lives no longer than its step
            elif isinstance(arg, Tensor):
                self.tensors.append(arg)
        for role in reaches:
            self.complete &= self._knows(role) or not isinstance(role, MovingTensors)
        self.launches.append(Noted(call, kept, alone, tuple(reaches)))
        if kernel is not None and kernel not in self.kernels:
            self.kernels.append(kernel)

    def note_table(self, roles: TensorLists, table: Moves | None) -> None:
        """Note a table of these lists: it moves with one of them, or none of them may."""
        moving = [role for role in roles if not isinstance(role, FixedTensors)]
        if table is not None and len(moving) == 1 and self._knows(moving[0]):
            self.tables.append((table, cast(MovingTensors, moving[0])))
        else:
            self.complete &= not moving


def recorder() -> Recorder | None:
    """The recorder of this thread, if there is one."""
    return _current.get()


@contextmanager
def recording(to: Recorder) -> Iterator[None]:
    """Tell a recorder of what this thread does inside."""
    token = _current.set(to)
    try:
        yield
    finally:
        _current.reset(token)


def refuse() -> None:
    """Tell the recorder of something that cannot be done again."""
    notes = recorder()
    if notes is not None:
        notes.complete = False


def note_table(roles: TensorLists, table: Moves | None = None) -> None:
    """Tell the recorder of a table; see `Recorder.note_table`."""
    notes = recorder()
    if notes is not None:
        notes.note_table(roles, table)


def note_zeros(memory: Tensor) -> None:
    """Tell the recorder of memory that launches must find zeroed."""
    notes = recorder()
    if notes is not None:
        notes.zeros.append(memory)
