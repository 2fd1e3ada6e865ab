"""Errors of a kernel that does what the GPU would not do, or should not do.

Every message is one sentence with the kernel, the source line, the thread and the values.
"""

from __future__ import annotations


class ReplayError(RuntimeError):
    """Base of everything that replay refuses or finds."""


class OutOfBounds(ReplayError):
    """An access outside every tensor that the launch may touch; memory was not touched."""


class Misaligned(ReplayError):
    """An access whose address is not a multiple of its width; memory was not touched."""


class UnknownInstruction(ReplayError):
    """An instruction, register or directive whose meaning replay does not implement."""


class Deadlock(ReplayError):
    """Threads that wait for others which never come, or a launch that makes no progress."""


class Race(ReplayError):
    """Two threads touch the same bytes without an order between them, one of them writing."""


class UninitialisedRead(ReplayError):
    """A read of bytes that were never written."""


class KernelTrap(ReplayError):
    """The kernel itself stopped: `trap` or a failed device assertion."""


class UnsupportedTriton(ReplayError):
    """The installed Triton is outside the range that replay was tested with."""


class NotLiftable(ReplayError):
    """A kernel's formula cannot be read from its code; names the instruction and its line."""
