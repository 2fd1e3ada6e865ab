"""Rows from the registry: every kernel that can be timed here, with peers and ceilings beside it.

A kernel gets a row by being registered. It is timed where it runs for real: on a GPU, or on the
CPU if it is written for it. Replay is no clock, so kernels that need a GPU have no time without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from twinstep.benchmarks.beside.ceilings import ceilings
from twinstep.benchmarks.beside.peers import Absent, peers_of
from twinstep.benchmarks.beside.subject import Shape, Subject, arguments_of
from twinstep.parity.registry.engines import claimed_engines, engine_among, uses_triton
from twinstep.parity.registry.kernels import Kernel

USUAL = ("bf16", "fp32")  # dtype combinations that are timed, the first that is claimed
AGAIN = " again"  # the same kernel once more: the A/A control
SLOW = 1.0  # seconds of a peer's call, above which it takes no turns
OURS, PEER, CEILING = "ours", "peer", "ceiling"


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
        version: of a peer's package.
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
    usual = [dtype for dtype in USUAL if dtype in kernel.dtypes]
    return (*usual, *kernel.dtypes)[0]


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
        and group.dtype in kernel.dtypes
        and group.shape.layout in kernel.layouts
    ]


def subject_of(kernel: Kernel, group: Group) -> Subject:
    """A kernel with arguments of its own."""
    device = device_of(kernel)
    assert device is not None, kernel.name
    arguments = arguments_of(kernel.operation, group.dtype, group.shape, device)
    return Subject(lambda: arguments.call(kernel), arguments.restore, device)


def require_quick(subject: Subject) -> None:
    """Call a peer once, for what it compiles and allocates, and once more on the clock.

    Raises:
        Absent: it is too slow to take turns with the others.
    """
    subject.restore()
    subject.call()
    seconds = subject.turn()
    if seconds > SLOW:
        raise Absent(f"one call takes {seconds:.1f} s")


def rows(kernels: Sequence[Kernel], group: Group) -> tuple[list[Timed], int]:
    """All rows of a group, and the bytes that one call must move, at least.

    Our kernels, the first again as a control, peers, ceilings; each with tensors of its own.
    """
    chosen = ours(kernels, group)
    first, device = chosen[0], device_of(chosen[0])
    assert device is not None, first.name
    found = [Timed(kernel.name, OURS, subject_of(kernel, group)) for kernel in chosen]
    found.append(Timed(first.name + AGAIN, OURS, subject_of(first, group)))
    given = partial(arguments_of, first.operation, group.dtype, group.shape, device)
    for peer in peers_of(first.operation.name, device):
        try:
            known, own = peer.version(), given()
            subject = Subject(peer.make(own), own.restore, device)
            require_quick(subject)
        except Absent as reason:
            found.append(Timed(peer.name, PEER, None, str(reason)))
        except Exception as error:  # a peer's build, or its kernels
            sentence = (str(error).splitlines() or [""])[0]
            found.append(Timed(peer.name, PEER, None, f"{type(error).__name__}: {sentence}"))
        else:
            found.append(Timed(peer.name, PEER, subject, "", known))
    one = given()
    passes = ceilings(one.bytes, one.sized_written, device)
    return [*found, *(Timed(name, CEILING, made) for name, made in passes.items())], one.bytes
