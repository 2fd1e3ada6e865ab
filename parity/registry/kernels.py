"""Registered kernels: one row each, ours and those of users.

A kernel declares what it claims: dtype combinations, layouts, engines and its arithmetic. What it
does not declare is "not claimed" in the ledger, never passed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.parity.expected.deviations import known_deviations
from twinstep.parity.operations.operation import LAYOUTS, Operation
from twinstep.parity.operations.signature import check_combinations, check_shapes, check_signature
from twinstep.parity.operations.table import add_operation, borrowed_operations, operation_named
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.names import ENGINES, check_among

ARITHMETICS = ("bounded", "exact")
CLAIMS = ("strided", "capturable")
DEFAULT_DTYPES = ("fp16", "bf16", "fp32")
Function = Callable[..., object]


@dataclass(frozen=True, init=False)
class Elsewhere:
    """Function of a kernel that only another process has loaded.

    Attributes:
        triton: whether it launches Triton kernels.
    """

    triton: bool
    __name__: str

    def __init__(self, name: str, triton: bool) -> None:
        object.__setattr__(self, "__name__", name)
        object.__setattr__(self, "triton", triton)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Refuse: it would run where the judge is."""
        raise TypeError(f"{self.__name__} runs in its own process and cannot be called here")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A registered implementation of an operation.

    Attributes:
        name: unique.
        operation: whose contract it claims to keep.
        function: writes its arguments in place and returns None.
        arithmetic: `exact` (bit for bit) or `bounded` (within the derived bound).
        dtypes: dtype combinations it claims.
        layouts: `flat`, `list`; empty where the operation has no lists.
        engines: where it may run; empty means that the judge finds out.
        claims: optional laws it wants to be held to, by what they are for: `strided`,
            `capturable`.
        place: file and line of the function.
        source: the file that registers it, where that is known; it may have the function from
            another.
        accept: deviations that its bounds allow for, and the reason of each.
    """

    name: str
    operation: Operation
    function: Function
    arithmetic: str
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    engines: tuple[str, ...]
    place: str
    claims: tuple[str, ...] = ()
    source: str = ""
    accept: tuple[tuple[str, str], ...] = ()

    @property
    def file(self) -> Path:
        """The file that registers the kernel, or else the one that defines the function."""
        return Path(self.source or self.place.rpartition(":")[0])

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function."""
        return self.function(*args, **kwargs)


_kernels: dict[str, Kernel] = {}


def register(
    operation: str,
    *,
    name: str | None = None,
    arithmetic: str = "bounded",
    dtypes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    engines: Sequence[str] = (),
    claims: Sequence[str] = (),
    accept: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function as a kernel of an operation; the function stays unchanged.

    Args:
        operation: name of the operation, see `docs/reference/operations.md`.
        name: of the kernel; the function's own by default.
        arithmetic: "bounded" (within a bound derived from the operation's formula) or "exact"
            (every bit).
        dtypes: dtype combinations it handles; by default those of fp16, bf16 and fp32 that the
            operation has.
        layouts: "list" (many tensors), "flat" (lists of one); by default both.
        engines: "cuda", "replay", "cpu", "interpret"; by default found out: Triton kernels run
            on the GPU or on replay, everything else on the CPU.
        claims: "strided" (matrices that are not contiguous are handled, or refused with a clear
            error),
            "capturable" (reads no device value on the host; may be captured as a CUDA graph).
        accept: deviations by name that the bound of a bounded kernel then holds besides, each with
            the reason for it, which the table shows; `parity/expected/deviations.py` has the names.

    Raises:
        UsageError: unknown operation, dtype, layout, engine, arithmetic, claim or deviation, a
            deviation without a reason, a taken name, or a signature that is not the operation's.
    """

    def decorate(function: Function) -> Function:
        place = _place(function)
        accepted = tuple((accept or {}).items())
        contract = operation_named(operation, place, tuple(name for name, _ in accepted))
        kernel = Kernel(
            name=name or str(getattr(function, "__name__", operation)),
            operation=contract,
            function=function,
            arithmetic=arithmetic,
            dtypes=default_dtypes(contract) if dtypes is None else tuple(dtypes),
            layouts=tuple(layouts if layouts is not None else LAYOUTS) if contract.lists else (),
            engines=tuple(engines),
            claims=tuple(claims),
            place=place,
            source=sys._getframe(1).f_code.co_filename,
            accept=accepted,
        )
        add_kernel(kernel)
        return function

    return decorate


def default_dtypes(contract: Operation) -> tuple[str, ...]:
    """Dtype combinations of a kernel that names none."""
    usual = tuple(key for key in DEFAULT_DTYPES if key in contract.combinations)
    return usual or tuple(contract.combinations)


def add_kernel(kernel: Kernel) -> None:
    """Check a kernel and add it to the registry.

    Raises:
        UsageError: see `register`.
    """
    where = kernel.place
    if kernel.name in _kernels:
        other = _kernels[kernel.name].place
        raise UsageError(
            f'kernel "{kernel.name}" is registered already at {other}, '
            f"but names should be unique [{where}]"
        )
    check_among("arithmetic", [kernel.arithmetic], ARITHMETICS, where)
    check_among("dtypes", kernel.dtypes, tuple(kernel.operation.combinations), where)
    check_among("layouts", kernel.layouts, LAYOUTS, where)
    check_among("engines", kernel.engines, ENGINES, where)
    check_among("claims", kernel.claims, CLAIMS, where)
    for argument, values in (("dtypes", kernel.dtypes), ("layouts", kernel.layouts)):
        if not values and (argument == "dtypes" or kernel.operation.lists):
            raise UsageError(f"{argument} is empty, but should name at least one [{where}]")
    _check_accept(kernel)
    check_signature(kernel.function, kernel.operation, where)
    _kernels[kernel.name] = kernel


def _check_accept(kernel: Kernel) -> None:
    """Refuse a deviation that is unknown, has no reason, or is accepted of an exact kernel."""
    where, names = kernel.place, [name for name, _ in kernel.accept]
    known = known_deviations(kernel.operation.name)
    check_among("accept", names, known or ("nothing: this operation has none",), where)
    for name, reason in kernel.accept:
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"accept has {name}: {reason!r}, but should say why [{where}]")
    if names and kernel.arithmetic == "exact":
        raise UsageError(f"accept has {names[0]}, but an exact kernel has no deviation [{where}]")


def register_operation(operation: Operation) -> Operation:
    """Bring a new operation: reference, what it writes, dtype combinations, laws; see `Operation`.

    Raises:
        UsageError: the name is taken, a law is unknown, a written name is no argument, the
            reference is no function or has another signature, or a dtype combination does not fit.
    """
    from twinstep.parity.laws import LAWS

    where = f"register_operation {operation.name}"
    check_among("laws", operation.laws, tuple(LAWS), where)
    arguments = tuple(argument.name for argument in operation.lists) + operation.keywords
    check_among("writes", operation.writes, arguments, where)
    if not operation.writes or not operation.laws:
        raise UsageError(f"writes and laws should name at least one each [{where}]")
    if not callable(operation.reference):
        raise UsageError(
            f"reference is {operation.reference!r}, but should be a function [{where}]"
        )
    check_combinations(operation, where)
    check_shapes(operation, where)
    check_signature(operation.reference, operation, _place(operation.reference))
    add_operation(operation)
    return operation


def kernels() -> tuple[Kernel, ...]:
    """All registered kernels, in the order of registration."""
    return tuple(_kernels.values())


@contextlib.contextmanager
def registrations() -> Iterator[list[Kernel]]:
    """Collect what is registered inside the block, and forget it and its operations afterwards."""
    before = dict(_kernels)
    collected: list[Kernel] = []
    try:
        with borrowed_operations():
            yield collected
    finally:
        collected += [kernel for name, kernel in _kernels.items() if name not in before]
        _kernels.clear()
        _kernels.update(before)


def _place(function: Function) -> str:
    bare = inspect.unwrap(function)
    code = getattr(bare, "__code__", None)
    if code is None:
        return f"{getattr(function, '__module__', '?')}:0"
    return f"{code.co_filename}:{code.co_firstlineno}"
