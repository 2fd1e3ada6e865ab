"""Notes of a step's launches, from which `fast.runtime.repeated` makes those of later steps.

Whoever launches, lays out a table or zeroes memory for a launch tells the recorder of its thread,
if there is one; whoever does anything else that the next step must do again refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twinstep.fast.runtime.lists import FixedTensors, MovingTensors

Roles = Sequence[Sequence[Tensor]]
_current: ContextVar[Recorder | None] = ContextVar("recorder of this thread", default=None)


class Moves(Protocol):
    """A table with a row of addresses that moves."""

    def move(self, tensors: MovingTensors) -> None:
        """Write the addresses that the tensors have now."""


class Kernel(Protocol):
    """A kernel that has been compiled."""

    def unchanged(self) -> bool:
        """Return True while its source and what that has read are as they were."""


@dataclass(frozen=True, eq=False)
class Noted:
    """A launch.

    Attributes:
        call: launches.
        words: its arguments.
        alone: place among them, and number, of a moving list whose only tensor is an argument.
        by_address: tensors are given as addresses.
        reaches: lists that it reaches through tables; moving ones by their number.
    """

    call: Callable[..., object]
    words: Sequence[object]
    alone: list[tuple[int, int]]
    by_address: bool
    reaches: list[Sequence[Tensor] | int]


class Recorder:
    """Launches as they are made.

    Args:
        moving: lists whose tensors may lie elsewhere at every step.

    Attributes:
        complete: all that was done can be done again.
        launches: in their order.
        tables: that move, each with the number of its list.
        zeros: memory that is zero when the launches begin.
        tensors: arguments that do not move.
        kernels: that were compiled.
        slots: of moving lists with one tensor that is not empty, that one's slot by number.
    """

    def __init__(self, moving: Roles) -> None:
        self.complete = True
        self.launches: list[Noted] = []
        self.tables: list[tuple[Moves, int]] = []
        self.zeros: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.kernels: list[Kernel] = []
        self.slots: dict[int, int] = {}
        self._moving = moving
        for number, role in enumerate(moving):
            if isinstance(role, MovingTensors) and len(role.layout.filled) == 1:
                self.slots[number] = role.layout.filled[0]
        self._alone = [(moving[number][slot], number) for number, slot in self.slots.items()]

    def _number_of(self, role: object) -> int | None:
        return next((n for n, known in enumerate(self._moving) if known is role), None)

    def note_launch(
        self,
        call: Callable[..., object],
        words: Sequence[object],
        args: Sequence[object],
        *,
        first: int = 0,
        by_address: bool = False,
        reaches: Roles = (),
        kernel: Kernel | None = None,
    ) -> None:
        """Note that `call(*words)` was made; `args` are the kernel's, from place `first` on."""
        alone: list[tuple[int, int]] = []
        for place, arg in enumerate(args, start=first):
            number = next((number for tensor, number in self._alone if tensor is arg), None)
            if number is not None:
                alone.append((place, number))
            elif isinstance(arg, Tensor):
                self.tensors.append(arg)
        reached: list[Sequence[Tensor] | int] = []
        for role in reaches:
            number = self._number_of(role)
            reached.append(role if number is None else number)
            self.complete &= number is not None or not isinstance(role, MovingTensors)
        # A gradient lives no longer than its step.
        kept = list(words)
        for place, _ in alone:
            kept[place] = None
        self.launches.append(Noted(call, tuple(kept), alone, by_address, reached))
        if kernel is not None and kernel not in self.kernels:
            self.kernels.append(kernel)

    def note_table(self, roles: Roles, table: Moves | None) -> None:
        """Note a table of these lists: it moves with one of them, or none of them may."""
        moving = [role for role in roles if not isinstance(role, FixedTensors)]
        numbers = [self._number_of(role) for role in moving]
        if table is not None and len(numbers) == 1 and numbers[0] is not None:
            self.tables.append((table, numbers[0]))
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


def note_table(roles: Roles, table: Moves | None = None) -> None:
    """Tell the recorder of a table; see `Recorder.note_table`."""
    notes = recorder()
    if notes is not None:
        notes.note_table(roles, table)


def note_zeros(memory: Tensor) -> None:
    """Tell the recorder of memory that launches must find zeroed."""
    notes = recorder()
    if notes is not None:
        notes.zeros.append(memory)
