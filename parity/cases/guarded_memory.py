"""Guarded memory: every argument of one call lies in one block of bytes, with room in between.

The room before, between and after the tensors is filled with a guard byte, and after the call the
whole block is compared with what it was. One comparison so finds writes before the first element,
after the last, into alignment gaps, into read-only inputs and into a neighbour.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case

ALIGNMENT = 64
ROOM = 64
# Of a list, all but the first and the last.
INNER = "[1:-1]"
# Its tensors of one dtype and shape, each at the place of another.
EXCHANGED = " exchanged"
# All single tensors.
CONTROLS = "the controls"


@dataclass(frozen=True)
class Span:
    """Place of one tensor in the block.

    Attributes:
        name: of the argument.
        index: in its list; 0 for a control.
        start: first byte.
        value: the tensor's content before the call; gives dtype and shape.
        control: whether it is a 0-dim control.
        strides: of the tensor, in elements; empty if it is contiguous.
    """

    name: str
    index: int
    start: int
    value: Tensor
    control: bool
    strides: tuple[int, ...] = ()

    @cached_property
    def stop(self) -> int:
        """First byte past the tensor."""
        size, shape = self.value.element_size(), self.value.shape
        last = sum((n - 1) * by for n, by in zip(shape, self._strides, strict=True))
        return self.start + (last + 1) * size if self.value.numel() else self.start

    def fits(self, other: Span) -> bool:
        """True if it begins where another one does, of the same argument, and is no longer."""
        same = (self.name, self.index, self.start) == (other.name, other.index, other.start)
        return same and self.stop <= other.stop

    def side_of(self, byte: int) -> str:
        """Place of a byte that is none of the tensor's."""
        if byte < self.start:
            return f"{self.start - byte} bytes before the start"
        past = byte - self.stop
        return f"{past} bytes past the end" if past >= 0 else "between the elements"

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return self.strides or self.value.contiguous().stride()

    @cached_property
    def _of_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides with the bytes of an element as the last dimension."""
        size = self.value.element_size()
        return (*self.value.shape, size), (*(by * size for by in self._strides), 1)

    def bytes_of(self, block: Tensor) -> Tensor:
        """The tensor's bytes inside a block, or what a mask has for them: a view (..., bytes)."""
        return block.as_strided(*self._of_bytes, block.storage_offset() + self.start)

    def of(self, block: Tensor) -> Tensor:
        """The tensor inside a block of bytes: a view, except that an empty tensor is new."""
        if not self.value.numel():
            return torch.empty(self.value.shape, dtype=self.value.dtype, device=block.device)
        return self.bytes_of(block).view(self.value.dtype).squeeze(-1)


def moved_among(spans: Sequence[Span], moved: str) -> list[Span]:
    """Those of a list of this name, without its ends if `INNER` is behind it; or all `CONTROLS`."""
    name = moved.removesuffix(INNER)
    rows = [span for span in spans if (CONTROLS if span.control else span.name) == name]
    rows.sort(key=lambda span: span.index)
    return rows[1:-1] if moved.endswith(INNER) else rows


def placed(spans: Sequence[Span], moved: Sequence[str]) -> list[Span]:
    """The spans, those of a list with `EXCHANGED` behind its name where their likes lie."""
    found = list(spans)
    for name in moved:
        likes: dict[object, list[int]] = {}
        for at, span in enumerate(found):
            if span.name + EXCHANGED == name:
                likes.setdefault((span.value.dtype, span.value.shape), []).append(at)
        for own in likes.values():
            starts = [found[at].start for at in reversed(own)]
            for at, start in zip(own, starts, strict=True):
                found[at] = replace(found[at], start=start)
    return found


def spans_of(case: Case) -> tuple[list[Span], int]:
    """Lay out all arguments of a case; also the length of the block."""
    if case.lies_as is not None:
        there, length = spans_of(case.lies_as)
        given = {**case.lists, **{name: [value] for name, value in case.controls.items()}}
        return [replace(span, value=given[span.name][span.index]) for span in there], length
    spans, end = [], 0

    def place(
        name: str, index: int, value: Tensor, skew: int, control: bool, adjacent: bool = False
    ) -> None:
        nonlocal end
        size = value.element_size()
        start = -(-(end + ROOM) // ALIGNMENT) * ALIGNMENT + skew * size
        if adjacent:
            start = -(-end // size) * size
        strides = case.storage.strides(name, value)
        spans.append(Span(name, index, start, value, control, strides))
        end = spans[-1].stop

    for number, (name, tensors) in enumerate(case.lists.items()):
        here = len(case.placement) == len(tensors)
        order = [*case.placement] if here else [*range(len(tensors))]
        if case.adjacent and number == 1:
            order.reverse()
        for at, index in enumerate(order):
            beside = case.adjacent and at > 0
            place(name, index, tensors[index], case.skews[name][index], False, beside)
    for name, value in case.controls.items():
        place(name, 0, value, 0, control=True)
    return spans, end + ROOM + ALIGNMENT


# An argument that may only be read: its place, the tensor, and its version before the call.
Read = tuple[Span, Tensor, int]


@dataclass
class Given:
    """Arguments as they were handed over: the lists' elements and each tensor's description."""

    lists: Mapping[str, list[Tensor]]

    def __post_init__(self) -> None:
        self._held = {name: [(t, _described(t)) for t in ts] for name, ts in self.lists.items()}

    def changes(self) -> Iterator[str]:
        """A sentence for each list whose elements, or whose tensors' descriptions, differ now."""
        for name, held in self._held.items():
            now = self.lists[name]
            if [id(tensor) for tensor in now] != [id(tensor) for tensor, _ in held]:
                yield f"changes the caller's list {name}"
            elif any(_described(tensor) != was for tensor, was in held):
                yield f"changes shape, memory or requires_grad of a tensor of {name}"


def _described(tensor: Tensor) -> object:
    start = tensor.data_ptr() if tensor.numel() else 0
    return start, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def _filled(case: Case, spans: list[Span], length: int) -> Tensor:
    """The bytes before the call."""
    before = torch.full((length,), case.guard, dtype=torch.uint8)
    for number, span in enumerate(spans):
        if span.strides:
            # Of each tensor another byte, so that a gap that is copied shows.
            before[span.start : span.stop] = (case.guard + 1 + number) % 256
        if span.value.numel():
            span.of(before).copy_(span.value)
    return before


@dataclass
class GuardedMemory:
    """The block of one call, on the kernel's device.

    Attributes:
        case: whose arguments it holds.
        spans: where they lie.
        block: the bytes the kernel works on, uint8.
        before: the bytes as they were before the call, on the CPU.
        graph: the call captured as a CUDA graph on this memory.
        ends: the bytes that a large call left at each of its places (see `Call.end`).
        other: a second block, for tensors that lie elsewhere in some calls.
        elsewhere: during a call, the block that holds a tensor which does not lie in `block`, by
            name and index; in `block` its place holds ones.
        changed: sentences on what the last call did to its arguments besides writing to them.
        held: arguments by name and index that are the same tensors in every call in this memory.
        made: tensors that guarded calls in this memory have made and not let go.
        number: of the same memory in another process, where the kernel works.
    """

    case: Case
    spans: list[Span]
    block: Tensor
    before: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    ends: Mapping[str, Tensor] = field(default_factory=dict)
    other: Tensor | None = None
    elsewhere: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    held: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    made: list[weakref.ref[Tensor]] = field(default_factory=list)
    number: int = -1

    @classmethod
    def of(cls, case: Case, device: torch.device, moved: Sequence[str] = ()) -> GuardedMemory:
        """Lay a case out in fresh memory; `moved`: see `placed`."""
        spans, length = spans_of(case)
        spans = placed(spans, moved)
        before = _filled(case, spans, length)
        return cls(case, spans, before.clone().to(device), before)

    def renewed(self, case: Case, moved: Sequence[str] = ()) -> GuardedMemory:
        """The same memory, filled with what another case holds that lies alike in it.

        Args:
            case: to be held.
            moved: tensors that lie in the other block in the next call (see `moved_among`), or
                each in the place of another (see `placed`).

        Raises:
            ValueError: the case lies otherwise.
        """
        spans, _ = spans_of(case)
        pairs = zip(spans, self.spans, strict=False)
        if len(spans) != len(self.spans) or not all(new.fits(old) for new, old in pairs):
            raise ValueError(
                "a case cannot reuse memory in which it would lie otherwise [guarded_memory]"
            )
        there = placed(spans, moved)
        exchanged, spans = there != spans, there
        before = _filled(case, spans, self.before.numel())
        self.block.copy_(before)
        elsewhere = {}
        if moved and self.other is None:
            self.other = self.block.clone()
        if self.other is not None:
            self.other.copy_(self.block)
            rows = {id(span): span for name in moved for span in moved_among(spans, name)}
            for span in rows.values():
                elsewhere[span.name, span.index] = self.other
                span.bytes_of(self.block).fill_(0xFF)
        renewed = replace(self, case=case, spans=spans, before=before, changed=())
        # Shorter tensors are others, and so are those at other places.
        held = {} if case.lies_as is not None or exchanged else self.held
        return replace(renewed, elsewhere=elsewhere, held=held)

    def refill(self) -> None:
        """Put the bytes from before the call back, at the same addresses."""
        self.block.copy_(self.before)

    def call(self, kernel: Callable[..., object]) -> object:
        """Call the kernel with views into the block."""
        lists: dict[str, list[Tensor]] = {name: [] for name in self.case.lists}
        controls: dict[str, Tensor] = {}
        read: list[Read] = []
        for span in sorted(self.spans, key=lambda span: span.index):
            tensor = self._given(span)
            if span.control:
                controls[span.name] = tensor
            else:
                lists[span.name].append(tensor)
            if span.name not in self.case.operation.writes:
                read.append((span, tensor, tensor._version))
        for name in self.case.leaves:
            lists[name] = [tensor.detach().requires_grad_() for tensor in lists[name]]
        positional = [lists[argument.name] for argument in self.case.operation.lists]
        given = Given(lists)
        recording = torch.no_grad() if self.case.leaves else contextlib.nullcontext()
        try:
            with recording:
                return kernel(*positional, **controls, **self.case.options)
        finally:
            self.changed = (*given.changes(), *self._put_back(read))
            for span in self.spans:
                there = self.elsewhere.get((span.name, span.index))
                if there is not None:
                    span.bytes_of(self.block).copy_(span.bytes_of(there))

    def _put_back(self, read: Iterable[Read]) -> Iterator[str]:
        """A sentence for the first of them that was written to, and holds what it held before.

        That takes two operations in place. A single one has left everything as it was: torch
        counts what its fused Adam reads as written.
        """
        for span, tensor, version in read:
            if tensor._version < version + 2 or not span.value.numel():
                continue
            if torch.equal(span.bytes_of(self.block).cpu(), span.bytes_of(self.before)):
                name = span.name if span.control else f"{span.name}[{span.index}]"
                yield f"writes to {name}, which it may only read, and puts back what was there"
                return

    def hold(self) -> None:
        """Let all arguments be the same tensors from now on, as a training loop's are."""
        for span in self.spans:
            self.held.setdefault((span.name, span.index), span.of(self.block.data))

    def _given(self, span: Span) -> Tensor:
        """A tensor as the call gets it."""
        place = span.name, span.index
        if place in self.elsewhere:
            return span.of(self.elsewhere[place])
        held = self.held.get(place)
        # Views of the data have versions of their own, which no write beside them moves.
        return span.of(self.block.data) if held is None else held

    def named(self) -> dict[str, Tensor]:
        """The tensors of the call, by the names that messages give them; old places of them too."""
        found = {}
        for span in self.spans:
            name = span.name if span.control else f"{span.name}[{span.index}]"
            found[name] = self._given(span)
            if (span.name, span.index) in self.elsewhere:
                found[f"{name} of an earlier call"] = span.of(self.block)
        return found

    def after(self) -> Tensor:
        """The bytes now, on the CPU."""
        return self.block.cpu().clone()

    def read(self, block: Tensor) -> Mapping[tuple[str, int], Tensor]:
        """All tensors inside a block, by argument and index."""
        return {(span.name, span.index): span.of(block) for span in self.spans}
