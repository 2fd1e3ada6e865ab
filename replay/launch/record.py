"""The record of a launch, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache


@dataclass
class Traffic:
    """Bytes moved between a kernel and one buffer.

    Equal addresses that the threads of one warp touch in one instruction count once, as the
    hardware merges them; atomics count as read and written.
    """

    read: int = 0
    written: int = 0
    reads: int = 0
    writes: int = 0
    atomics: int = 0


@dataclass
class Launch:
    """The record of one launch.

    Attributes:
        kernel: Name of the entry.
        grid: Blocks in x, y, z.
        block: Threads in x, y, z.
        hash: SHA-256 of the PTX text.
        buffers: Traffic by buffer (argument name, or label of an allowed tensor).
        widths: Thread accesses of global memory by ("read" | "write" | "atomic", bytes).
        opcodes: Thread instructions by opcode.
        classes: The same by class: float, integer, convert, memory, control, warp, other.
        approximations: Approximate instructions by name, thread counts.
        approximated_at: Source line of the first of each name.
        barriers: Threads that passed a barrier.
        shared_read, shared_written: Bytes of shared memory.
        seconds: Wall-clock time of the launch.
        tuning: An autotuner made it for its time, and leaves in the arguments what it wrote.
        miscounted_at: Source line of an atomic whose value decides what a block stores, if blocks
            were left out (`options(only_ends=...)`): it counts fewer than there are.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    hash: str
    buffers: dict[str, Traffic] = field(default_factory=dict)
    widths: Counter[tuple[str, int]] = field(default_factory=Counter)
    opcodes: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    approximations: Counter[str] = field(default_factory=Counter)
    approximated_at: dict[str, str] = field(default_factory=dict)
    barriers: int = 0
    shared_read: int = 0
    shared_written: int = 0
    seconds: float = 0.0
    tuning: bool = False
    miscounted_at: str = ""

    @property
    def bytes_read(self) -> int:
        """Bytes read from all buffers."""
        return sum(traffic.read for traffic in self.buffers.values())

    @property
    def bytes_written(self) -> int:
        """Bytes written to all buffers."""
        return sum(traffic.written for traffic in self.buffers.values())


_LOGS: ContextVar[tuple[list[Launch], ...]] = ContextVar("replay logs", default=())


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collect the record of every launch that this thread makes inside the context."""
    log: list[Launch] = []
    token = _LOGS.set((*_LOGS.get(), log))
    try:
        yield log
    finally:
        _LOGS.reset(token)


def recording() -> bool:
    """True if this thread has a log open."""
    return bool(_LOGS.get())


def publish(launch: Launch) -> None:
    """Add a record to every log of this thread."""
    for log in _LOGS.get():
        log.append(launch)


_CLASSES = {
    "float": "add sub mul fma mad div sqrt rcp rsqrt min max abs neg ex2 lg2 sin cos tanh",
    "convert": "cvt",
    "memory": "ld st atom red cp prefetch cvta",
    "control": "bra brx ret exit call trap bar barrier membar fence",
    "warp": "shfl vote match redux elect activemask",
    "move": "mov selp prmt",
}
_CLASS_OF = {head: name for name, heads in _CLASSES.items() for head in heads.split()}
_FLOAT_TYPES = ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2", "f32x2")


@cache
def class_of(opcode: str) -> str:
    """The class of an opcode for `Launch.classes`."""
    head, kind = opcode.partition(".")[0], opcode.rpartition(".")[2]
    name = _CLASS_OF.get(head, "integer")
    return "integer" if name == "float" and kind not in _FLOAT_TYPES else name
