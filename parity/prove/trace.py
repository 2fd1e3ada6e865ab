"""One call of a kernel and of its reference on names, from the same leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, evaluate
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.prove.exact_sums import SUMS_ARE_EXACT, places
from twinstep.parity.prove.host_numbers import HostReads
from twinstep.parity.prove.torch_names import TorchNames
from twinstep.parity.registry.engines import Engine, as_on, followed
from twinstep.replay.dtypes import Array
from twinstep.replay.names.naming import granules_of, naming, set_names
from twinstep.replay.names.normal import new_table
from twinstep.replay.names.session import Session
from twinstep.replay.names.sums import Sums
from twinstep.replay.names.table import Table

Leaf = tuple[str, int, int]
"""An argument, its position in the list, and an element of it."""


@dataclass(frozen=True)
class Output:
    """One written tensor after the call.

    Attributes:
        name: of the argument.
        index: in its list.
        kernel: numbers of its elements, flat; -1 where no leaf enters.
        reference: likewise.
        got: the values of this run.
        expected: likewise.
    """

    name: str
    index: int
    kernel: Array
    reference: Array
    got: Tensor
    expected: Tensor

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"{self.name}[{self.index}]"


@dataclass
class Trace:
    """A call on names.

    Attributes:
        outputs: everything that is written.
        decided: each condition that was decided by its value, in order: number, outcome, place.
        foreign: a read of numbers that the host computed outside of torch; empty if there is none.
        assumed: properties of torch on this machine that expressions rest on.
    """

    outputs: list[Output]
    decided: list[tuple[int, bool, str]]
    foreign: str
    assumed: tuple[str, ...]


@dataclass
class Tracer:
    """Makes calls of one kernel on names; leaves keep their numbers from call to call.

    Attributes:
        function: the kernel.
        engine: where it runs: `replay` or `cpu`.
        table: the expressions of all calls.
        leaves: number of each leaf, and what it is.
    """

    function: Callable[..., object]
    engine: Engine
    table: Table = field(default_factory=new_table)
    leaves: dict[Leaf, int] = field(default_factory=dict)

    def trace(self, case: Case) -> Trace:
        """Call the reference, then the kernel.

        Raises:
            NotNamed: a name reaches what is not followed.
            CannotReplay: replay itself cannot run the kernel.
        """
        session = Session(table=self.table, sums=Sums(places))
        lists = {name: [t.clone() for t in ts] for name, ts in case.lists.items()}
        controls = {name: t.clone() for name, t in case.controls.items()}
        memory = GuardedMemory.of(case, torch.device("cpu"))
        with naming(session):
            for name, tensors in [*lists.items(), *((n, [t]) for n, t in controls.items())]:
                for index, tensor in enumerate(tensors):
                    self._name(session, case, name, index, tensor)
            for span in memory.spans:
                self._name(session, case, span.name, span.index, span.of(memory.block))
            # Both are kept until the end: memory that is given back would keep its names.
            plain = TorchNames(session)
            expected = self._expected(session, replace(case, controls=controls), lists, plain)
            mode = TorchNames(session)
            with self._running(memory), mode, HostReads(mode), followed() as fates:
                memory.call(as_on(self.engine, self.function))
            # A launcher that goes on without its kernel is no proof of the kernel.
            for _, error in () if fates is None else fates.raised:
                raise error
            outputs = list(self._outputs(plain, mode, memory, expected))
        decided = [(number, *rest) for number, rest in session.decided.items()]
        sums = {SUMS_ARE_EXACT: None} if session.sums.used else {}
        assumed = tuple({**plain.assumed, **mode.assumed, **sums})
        return Trace(outputs, decided, session.memory.foreign, assumed)

    def _expected(
        self, session: Session, case: Case, lists: dict[str, list[Tensor]], mode: TorchNames
    ) -> Mapping[str, list[Tensor]]:
        """What the kernel is compared with: the reference."""
        with mode, HostReads(mode):
            return evaluate(case, lists)

    def _name(self, session: Session, case: Case, name: str, index: int, tensor: Tensor) -> None:
        if not tensor.numel() or not is_named(case, name, tensor):
            set_names(session, tensor, None)
            return
        control = name in case.controls
        numbers = []
        for element in range(tensor.numel()):
            leaf = (name, index, element)
            if leaf not in self.leaves:
                word = name if control else f"{name}[{index}][{element}]"
                self.leaves[leaf] = self.table.leaf(word, tensor.element_size() // 2)
            numbers.append(self.leaves[leaf])
        set_names(session, tensor, np.array(numbers, np.int64).reshape(tensor.shape))

    @contextmanager
    def _running(self, memory: GuardedMemory) -> Iterator[None]:
        if self.engine.name != "replay":
            yield
            return
        from twinstep.replay import allow
        from twinstep.replay.names.triton_arguments import named_arguments

        with allow(**memory.named()), named_arguments():
            yield

    def _outputs(
        self,
        plain: TorchNames,
        mode: TorchNames,
        memory: GuardedMemory,
        expected: Mapping[str, list[Tensor]],
    ) -> Iterator[Output]:
        for span in memory.spans:
            if span.name in memory.case.operation.writes and span.value.numel():
                got, wanted = span.of(memory.block), expected[span.name][span.index]
                site = f"{span.name}[{span.index}], which neither torch nor replay has written"
                names = (mode.names(got, site).reshape(-1), plain.names(wanted).reshape(-1))
                yield Output(span.name, span.index, *names, got.clone(), wanted)


def is_named(case: Case, name: str, tensor: Tensor) -> bool:
    """True if every value of an argument is covered: floats, and 16- and 32-bit state.

    Counters and whole numbers keep the values of the case, and so does a flag that is written.
    """
    decision = any(control.name == name and control.decision for control in case.operation.controls)
    if decision and name in case.operation.writes:
        return False
    return tensor.is_floating_point() or tensor.dtype in (torch.int16, torch.int32)


def kept_values(cases: Sequence[Case]) -> dict[str, tuple[int, ...]]:
    """Arguments that are no names, and their values: counters, and flags that are written."""
    found: dict[str, set[int]] = {}
    for case in cases:
        for name, tensors in [*case.lists.items(), *((n, [t]) for n, t in case.controls.items())]:
            kept = [t for t in tensors if t.numel() and not is_named(case, name, t)]
            if kept:
                found.setdefault(name, set()).update(int(t.reshape(-1)[0]) for t in kept)
    return {name: tuple(sorted(values)) for name, values in found.items()}


def same(a: Tensor, b: Tensor) -> Array:
    """Mask of equal elements, flat, by bits; all NaN are one value."""
    x, y = (granules_of(t.detach()).reshape(t.numel(), -1) for t in (a, b))
    equal = (x == y).all(-1)
    if a.is_floating_point():
        equal |= (torch.isnan(a) & torch.isnan(b)).reshape(-1).numpy()
    return np.asarray(equal)


def with_values(case: Case, values: Mapping[Leaf, int]) -> Case:
    """The case with other bits at some leaves."""
    lists = {name: [t.clone() for t in ts] for name, ts in case.lists.items()}
    controls = {name: t.clone() for name, t in case.controls.items()}
    for (name, index, element), bits in values.items():
        tensor = controls[name] if name in controls else lists[name][index]
        size = tensor.element_size()
        word = np.array([bits], f"u{size}").view(f"i{size}")
        place = tensor.reshape(-1)[element : element + 1]
        place.copy_(torch.from_numpy(word).view(tensor.dtype))
        if tensor.numel() and place.data_ptr() != tensor.data_ptr() + element * size:
            tensor.view(-1)[element] = place[0]
    return replace(case, lists=lists, controls=controls)
