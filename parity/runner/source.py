"""Source of what is judged: our own kernels here, or a user's file in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.runner.calls.subject import Subject
from twinstep.parity.runner.interpreter import remarks
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.registry import Twin, twins


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Contents of a source.

    Attributes:
        kernels: in order.
        optimizers: classes, in order.
        subject: the process that a user's run in; None for ours.
        remarks: what is likely to go wrong, one sentence each.
    """

    kernels: Sequence[Kernel]
    optimizers: Sequence[Twin]
    subject: Subject | None = None
    remarks: Sequence[str] = ()

    def remarks_on_interpreter(self, names: Sequence[str]) -> list[str]:
        """Sentences beside verdicts that were reached in Triton's interpreter."""
        if self.subject is None:
            return remarks([kernel for kernel in self.kernels if kernel.name in names])
        if not names:
            return []
        return cast(list[str], self.subject.ask("interpreted", tuple(names), seconds=60.0))


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of what is judged.

    Attributes:
        file: a user's file; None means ours.
    """

    file: str | None = None

    def open(self) -> Opened:
        """Register it in this process, or start the process that loads it.

        Raises:
            UsageError: the file cannot be imported, or registers nothing.
        """
        if self.file is not None:
            return _opened(self.file)
        register_house()
        register_our_optimizers()
        return Opened(kernels=kernels(), optimizers=twins())


def _opened(path: str) -> Opened:
    """Load a file in a process of its own.

    A file that brings its own reference is imported here as well, because the judge evaluates that.
    """
    subject = Subject(file=path)
    declared = subject.load()
    here = load_file(path) if declared.own else None
    return Opened(
        subject=subject,
        kernels=declared.kernels if here is None else here.kernels,
        optimizers=declared.twins if here is None else here.twins,
        remarks=declared.remarks,
    )
