"""Rows of every kernel that can be timed here, and of our classes, with peers and ceilings beside.

A kernel gets a row by being registered. It is timed where it runs for real: on a GPU, or on the
CPU if it is written for it. Replay is no clock, so kernels that need a GPU have no time without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from twinstep.benchmarks.beside.ceilings import ceilings
from twinstep.benchmarks.beside.peers import Absent, Peer, peers_of
from twinstep.benchmarks.beside.subject import (
    Arguments,
    Shape,
    Subject,
    arguments_of,
    usual_threads,
)
from twinstep.parity.registry.engines import claimed_engines, engine_among, uses_triton
from twinstep.parity.registry.kernels import Kernel

if TYPE_CHECKING:
    from twinstep.benchmarks.beside.classes import ClassStep

USUAL = ("bf16", "fp32")  # dtype combinations that are timed, the first that is claimed
MIXED = "mixed"  # a combination of tensors of several others, each of which it takes alone, too
AGAIN = " again"  # the same kernel once more: the A/A control
ALONE = 1 << 15  # elements of each tensor, below which one thread may be the best choice
MANY = 10_000  # tensors, from which on more of them need no other choice of threads
SLOW = 4.0  # seconds of a peer's call, above which it takes no turns
OURS, PEER, CEILING, PART = "ours", "peer", "ceiling", "part"
STEP = "step"  # the operation of whole classes
Kin = tuple[str, str, int, str]


@dataclass(frozen=True, order=True)
class Group:
    """A comparison: one operation in one dtype combination at one shape."""

    operation: str
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        """Operation, dtypes and shape, as the table names them."""
        return f"{self.operation} {self.dtype} {self.shape}"


@dataclass(frozen=True)
class Timed:
    """A row that is ready.

    Attributes:
        name: of kernel, peer or ceiling.
        family: `ours`, `peer` or `ceiling`.
        subject: what takes turns; None where it is absent.
        absent: the reason.
        version: name and version of a peer's package.
    """

    name: str
    family: str
    subject: Subject | None
    absent: str = ""
    version: str = ""


def engines_of(kernel: Kernel) -> tuple[str, ...]:
    """Engines of a kernel: of Triton a GPU and replay, of everything else the CPU."""
    if kernel.engines or uses_triton(kernel.function):
        return kernel.engines or ("cuda", "replay")
    # Last, because it looks through all that the function can reach.
    return claimed_engines(kernel) or ("cpu",)


def device_of(kernel: Kernel) -> torch.device | None:
    """Device on which a kernel can be timed here; None for nowhere."""
    engine = engine_among(engines_of(kernel), triton=False)
    if engine.missing or engine.name not in ("cuda", "cpu"):
        return None
    return engine.device


def timed_kernels(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels that can be timed here, without those that only name another's function anew."""
    found: dict[object, Kernel] = {}
    for kernel in kernels:
        if kernel.operation.lists and device_of(kernel) is not None:
            found.setdefault((kernel.operation.name, kernel.function), kernel)
    return list(found.values())


def dtype_of(kernel: Kernel) -> str:
    """The dtype combination that a kernel is timed in."""
    usual = [dtype for dtype in USUAL if takes(kernel, dtype)]
    return (*usual, *kernel.dtypes)[0]


def takes(kernel: Kernel, dtype: str) -> bool:
    """True if a kernel claims a dtype combination, by its name or as a part of `mixed`."""
    if dtype in kernel.dtypes:
        return True
    known = kernel.operation.combinations
    if MIXED not in kernel.dtypes or dtype not in known:
        return False
    wide, own = known[MIXED], known[dtype]
    return own.keys() == wide.keys() and all(set(own[name]) <= set(wide[name]) for name in own)


def groups_of(kernels: Sequence[Kernel], shapes: Sequence[Shape]) -> list[Group]:
    """Groups of the kernels that can be timed, each once."""
    found: dict[Group, None] = {}
    for kernel in timed_kernels(kernels):
        for shape in shapes:
            if shape.layout in kernel.layouts:
                found[Group(kernel.operation.name, dtype_of(kernel), shape)] = None
    return list(found)


def ours(kernels: Sequence[Kernel], group: Group) -> list[Kernel]:
    """Kernels of a group that can be timed here."""
    return [
        kernel
        for kernel in timed_kernels(kernels)
        if kernel.operation.name == group.operation
        and takes(kernel, group.dtype)
        and group.shape.layout in kernel.layouts
    ]


def subject_of(kernel: Kernel, group: Group, own: Arguments | None = None) -> Subject:
    """A kernel with arguments of its own."""
    device = device_of(kernel)
    assert device is not None, kernel.name
    own = own or arguments_of(kernel.operation, group.dtype, group.shape, device)
    choices = tried(group, kernel.name, device)
    return Subject(partial(own.call, kernel), own.restore, device, choices=choices)


def tried(group: Group, name: str, device: torch.device) -> tuple[int, ...]:
    """Threads that a row is tried with; of many tensors those that were best for fewer of them.

    One comes first: who starts threads for each of many tensors may take seconds with more.
    """
    if device.type != "cpu" or group.shape.each >= ALONE:
        return ()
    known = best_threads().get(kin(group, name)) if group.shape.tensors >= MANY else None
    return (known,) if known else (1, usual_threads())


@cache
def best_threads() -> dict[Kin, int]:
    """Threads that rows of many tensors chose in this process."""
    return {}


def kin(group: Group, name: str) -> Kin:
    """Operation, dtypes, elements of a tensor and name: the same for any number of tensors."""
    return group.operation, group.dtype, group.shape.each, name


def rows(kernels: Sequence[Kernel], group: Group) -> tuple[list[Timed], int]:
    """All rows of a group, and the bytes that one call must move, at least.

    Ours, the first of them again as a control, peers, ceilings; each with tensors of its own.
    """
    return rows_of_classes(group) if group.operation == STEP else rows_of_kernels(kernels, group)


def rows_of_kernels(kernels: Sequence[Kernel], group: Group) -> tuple[list[Timed], int]:
    """Rows of one operation."""
    chosen = ours(kernels, group)
    first, device = chosen[0], device_of(chosen[0])
    assert device is not None, first.name
    given = arguments_of(first.operation, group.dtype, group.shape, device)
    made = partial(subject_of, group=group)
    found = [Timed(kernel.name, OURS, made(kernel, own=given.again())) for kernel in chosen]
    # The last that needs tensors takes those that were made to know the sizes.
    found.append(Timed(first.name + AGAIN, OURS, made(first, own=given)))

    def of(peer: Peer) -> Subject:
        own = given.again()
        choices = tried(group, peer.name, device)
        return Subject(peer.make(own), own.restore, device, choices=choices)

    for peer in peers_of(first.operation.name, device):
        found.append(of_peer(peer.name, peer.version, partial(of, peer)))
    read, written = given.read_and_written
    return [*found, *passes(read, written, device, group)], read + written


def rows_of_classes(group: Group) -> tuple[list[Timed], int]:
    """Rows of whole steps of optimizer classes."""
    # The gate measures older checkouts with this file; they may lack what these need.
    from twinstep.benchmarks.beside import classes

    device = classes.device()
    mine, others = classes.steps_of(group.dtype, device)

    def made(step: ClassStep) -> Subject:
        subject = classes.subject(step, group.shape, device)
        subject.choices = tried(group, step.name, device)
        return subject

    found = [Timed(step.name, OURS, made(step)) for step in mine]
    found.append(Timed(mine[0].name + AGAIN, OURS, made(mine[0])))
    for step in others:
        found.append(of_peer(step.name, step.version, partial(made, step)))
    read, written = (each * group.shape.numel for each in classes.BYTES[group.dtype])
    return [*found, *passes(read, written, device, group)], read + written


def of_peer(name: str, version: Callable[[], str], make: Callable[[], Subject]) -> Timed:
    """Row of a peer, warm, or absent with the reason: it may be too slow to take turns."""
    try:
        known, subject = version(), make()
        subject.settle()
        if subject.seconds > SLOW:
            raise Absent(f"one call takes {subject.seconds:.1f} s")
    except Absent as reason:
        return Timed(name, PEER, None, str(reason))
    except Exception as error:  # a peer's build, or its kernels
        sentence = (str(error).splitlines() or [""])[0]
        return Timed(name, PEER, None, f"{type(error).__name__}: {sentence}")
    return Timed(name, PEER, subject, "", known)


def passes(read: int, written: int, device: torch.device, group: Group) -> list[Timed]:
    """Rows of plain passes over as many bytes."""
    found = ceilings(read, written, device)
    for name, subject in found.items():
        subject.choices = tried(group, name, device)
    return [Timed(name, CEILING, subject) for name, subject in found.items()]
