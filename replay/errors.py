"""Errors of replay: faults of a kernel, and what replay itself cannot do.

Every message is one sentence with the kernel, the source line, the thread and the values. A
`CannotReplay` is no verdict on the kernel; every other error names something wrong.
"""

from __future__ import annotations


class ReplayError(RuntimeError):
    """Base of everything that replay refuses or finds."""


class OutOfBounds(ReplayError):
    """An access outside every tensor that the launch may touch; memory was not touched."""


class Misaligned(ReplayError):
    """An access whose address is not a multiple of its width; memory was not touched."""


class Deadlock(ReplayError):
    """Threads that wait for others which never come."""


class NoProgress(Deadlock):
    """Threads in a loop that never ends: registers and memory are again what they were."""


class Race(ReplayError):
    """Two threads touch the same bytes without an order between them, one of them writing."""


class UninitialisedRead(ReplayError):
    """A read of bytes that were never written."""


class InvalidArithmetic(ReplayError):
    """A division of an integer by zero, or a NaN made of numbers."""


class KernelTrap(ReplayError):
    """The kernel itself stopped: `trap` or a failed device assertion."""


class CannotReplay(ReplayError):
    """A limit of replay; the kernel may be right.

    Attributes:
        construct: The missing part: a feature such as "TMA", else an opcode or a directive.
        place: Line of the user's source, else of the PTX; "" where there is neither.
    """

    def __init__(self, message: str, construct: str = "", place: str = "") -> None:
        super().__init__(message)
        self.construct = construct
        self.place = place


class UnknownInstruction(CannotReplay):
    """An instruction, register, directive or piece of PTX text that replay does not implement."""


class UnsupportedArgument(CannotReplay):
    """A kernel argument of a kind that replay cannot pass."""


class UnsupportedTriton(CannotReplay):
    """The installed Triton is outside the range that replay was tested with."""


class NotLiftable(CannotReplay):
    """A kernel's formula cannot be read from its code; names the instruction and its line."""


class LimitReached(CannotReplay):
    """A launch that takes more time, steps or memory than replay was given."""
