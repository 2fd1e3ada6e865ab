"""A peer: an adapter from an operation to another project's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TypeVar, cast

from twinstep.parity.operations.operation import Control, Operation, OptionValue
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus.entry import Subject
from twinstep.parity.proof.corpus.shelf import put
from twinstep.parity.proof.peers.installed import is_installed
from twinstep.parity.registry.kernels import Kernel

Run = TypeVar("Run", bound=Callable[..., None])
Pinned = Mapping[str, tuple[float | OptionValue, ...]]


@dataclass(frozen=True, kw_only=True)
class Peer(Subject):
    """An adapter to another project's function, with the operation's signature.

    Attributes:
        package: the distribution that is judged.
        pinned: controls and options that the peer does not have or refuses some values of, with
            the values that are drawn for them instead.
        needs: empty, or what this machine lacks to run it.
    """

    package: str
    pinned: Pinned = field(default_factory=dict)
    needs: str = ""

    def missing(self) -> str:
        """Empty, or why it cannot be judged here."""
        return self.needs if is_installed(self.package) else f"{self.package} is not installed"

    def version(self) -> str:
        """The installed version of the package."""
        return version(self.package)

    def row(self) -> Kernel:
        """The peer as the judge takes it: within the derived bound, on CPU tensors."""
        contract = pinned_to(operation_named(self.operation, self.name), self.pinned)
        return Kernel(
            name=self.name,
            operation=contract,
            function=self.kernel,
            arithmetic="bounded",
            dtypes=self.dtypes,
            layouts=contract.layouts if contract.lists else (),
            engines=("cpu",),
            place=f"{self.name}:1",
        )


def pinned_to(operation: Operation, values: Pinned) -> Operation:
    """The operation with the given values, and no others, for some controls and options.

    Raises:
        KeyError: a name that the operation does not have.
    """
    for name in values:
        if name not in operation.keywords:
            raise KeyError(f"{operation.name} has no {name} to pin.")

    def control(row: Control) -> Control:
        if row.name not in values:
            return row
        # Its range would draw what the peer refuses.
        return replace(row, values=cast(tuple[float, ...], values[row.name]), range=None)

    return replace(
        operation,
        controls=tuple(control(row) for row in operation.controls),
        options=tuple(
            replace(row, choices=cast(tuple[OptionValue, ...], values.get(row.name, row.choices)))
            for row in operation.options
        ),
    )


def peer(
    shelf: list[Peer],
    operation: str,
    dtypes: tuple[str, ...] | None = None,
    **fields: object,
) -> Callable[[Run], Run]:
    """Decorator of a function of one call record; its docstring names what it calls."""
    return put(shelf, Peer, operation, dtypes, **fields)
