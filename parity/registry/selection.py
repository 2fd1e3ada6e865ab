"""Selection of what to judge, by the names that the flags of the commands take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.parity.laws import LAWS
from twinstep.parity.records.names import unknown
from twinstep.parity.registry.kernels import Kernel


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection of what is judged; empty means all.

    Attributes:
        operations: names of operations.
        names: names of kernels.
        dtypes: dtype combinations.
        laws: names of laws.
        engine: the engine that is asked for.
        also: names that select something other than kernels, and are no mistake either.
    """

    operations: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    engine: str | None = None
    also: Selection | None = None

    def kernels(self, known: Sequence[Kernel]) -> list[Kernel]:
        """The kernels that are selected.

        Raises:
            UsageError: a name selects nothing; the sentence lists what there is.
        """
        also = self.also or Selection()
        operations = {kernel.operation.name for kernel in known}
        dtypes = {dtype for kernel in known for dtype in kernel.operation.combinations}
        _each_known("--op", self.operations, operations.union(also.operations))
        _each_known("--kernel", self.names, {kernel.name for kernel in known}.union(also.names))
        _each_known("--dtype", self.dtypes, dtypes.union(also.dtypes))
        _each_known("--law", self.laws, set(LAWS).union(also.laws))
        return [
            kernel
            for kernel in known
            if (not self.operations or kernel.operation.name in self.operations)
            and (not self.names or kernel.name in self.names)
        ]


def _each_known(flag: str, asked: Sequence[str], known: set[str]) -> None:
    for value in asked:
        if value not in known:
            raise unknown(flag, value, known)
