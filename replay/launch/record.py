"""The record of a launch, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache

from twinstep.replay.errors import ReplayError


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
    for found in _FATES:
        found.completed += 1


@dataclass(eq=False)
class Fates:
    """The ends of the launches made in some time, in all threads.

    Attributes:
        completed: How many ran to their end.
        raised: The kernel and the error of each that did not, whoever has caught it since.
    """

    completed: int = 0
    raised: list[tuple[str, Exception]] = field(default_factory=list)


_FATES: list[Fates] = []


@contextmanager
def fates() -> Iterator[Fates]:
    """Follow all launches inside the context: a launcher may catch what one raises, and go on."""
    found = Fates()
    _FATES.append(found)
    try:
        yield found
    finally:
        _FATES.remove(found)


@contextmanager
def launching(kernel: str) -> Iterator[None]:
    """Note the fault that ends what is inside: the compilation of a kernel, or its launch."""
    try:
        yield
    except Exception as error:
        for found in _FATES if _is_fault(error) else ():
            if all(error is not known for _, known in found.raised):
                found.raised.append((kernel, error))
        raise


def _is_fault(error: Exception) -> bool:
    """True for all that replay raises, and for code that does not compile.

    Not for a configuration that asks for more than a GPU has, or that a `tl.static_assert` or
    ptxas refuses: Triton's own autotuner passes these over, and a launcher may do so, too. Nor for
    arguments that Triton does not take: a launcher may ask which version of it is there.
    """
    kind = type(error)
    compiler = kind.__module__.startswith("triton.compiler")
    refused = kind.__name__ == "CompileTimeAssertionFailure"
    broken = "PassManager::run failed" in str(error)
    return isinstance(error, ReplayError) or (compiler and not refused) or broken


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
