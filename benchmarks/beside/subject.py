"""One call that can be timed again and again: an operation's arguments at some size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import LAYOUTS, ListArgument, Operation, Role
from twinstep.parity.report.traffic_design import total

PATTERN = 1024  # values drawn; a tensor repeats them
TURN = 0.004  # seconds that one turn takes at least
MOST = 64  # calls in a turn


@dataclass(frozen=True, order=True)
class Shape:
    """So many tensors of so many elements each.

    >>> str(Shape(1, 2**22)), str(Shape(21_000, 64))
    ('4,194,304', '21,000 x 64')
    """

    tensors: int
    each: int

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.tensors * self.each

    @property
    def layout(self) -> str:
        """The layout of the operation's lists."""
        return LAYOUTS[0] if self.tensors == 1 else LAYOUTS[1]

    def __str__(self) -> str:
        """Elements of one tensor, or number and size of several."""
        return f"{self.each:,}" if self.tensors == 1 else f"{self.tensors:,} x {self.each:,}"


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call on a device; their first values are kept.

    Attributes:
        operation: whose they are.
        lists: tensors by argument.
        controls: 0-dim tensors by argument.
        options: plain values by argument.
        kept: tensors that the operation writes, and what they held at first.
    """

    operation: Operation
    lists: Mapping[str, list[Tensor]]
    controls: Mapping[str, Tensor]
    options: Mapping[str, object]
    kept: tuple[list[Tensor], list[Tensor]]

    def restore(self) -> None:
        """Put the first values back: repeated steps would reach infinities or subnormals."""
        written, first = self.kept
        if written:
            torch._foreach_copy_(written, first)

    def call(self, kernel: Callable[..., object]) -> None:
        """Call a kernel with them."""
        kernel(*self.lists.values(), **self.controls, **self.options)

    @property
    def bytes(self) -> int:
        """Bytes that must be read and written, at least; of an unknown operation each list once."""
        known = total(self.operation.name, self.lists)
        return known or sum(map(self._moved, self.operation.lists))

    def _moved(self, argument: ListArgument) -> int:
        tensors = self.lists[argument.name]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return size * ((argument.role is not Role.OUTPUT) + (argument.name in self.written))

    @property
    def written(self) -> tuple[str, ...]:
        """Lists that the operation writes."""
        return tuple(name for name in self.operation.writes if name in self.lists)

    @property
    def sized_written(self) -> bool:
        """True if it writes tensors as large as the parameters, so that a copy is its ceiling."""
        steps = self.operation.lists_of(Role.STEPS)
        return any(name not in steps for name in self.written)


def arguments_of(operation: Operation, dtype: str, shape: Shape, device: torch.device) -> Arguments:
    """Arguments with ordinary values."""
    options = {option.name: option.choices[0] for option in operation.options}
    turns = max((len(d) for d in operation.combinations[dtype].values()), default=1)
    own = any(argument.shape is not None for argument in operation.lists)
    few = shape.tensors if own else min(turns, shape.tensors)
    size = shape.each if own else min(shape.each, PATTERN)
    recipe = Recipe(
        layout=shape.layout,
        sizes=(size,) * few,
        regime="ordinary",
        seed=1,
        options=options,
        one_step=True,
    )
    case = generate(operation, dtype, recipe)
    lists: dict[str, list[Tensor]] = {}
    for argument in operation.lists:
        small = list(case.lists[argument.name])
        if own or not small:
            grown = [tensor.clone() for tensor in small]
        elif argument.role is Role.STEPS:
            grown = [small[0].clone() for _ in range(shape.tensors)]
        elif argument.single:
            grown = [_grown(small[0], shape.numel)]
        else:
            grown = [_grown(small[at % few], shape.each) for at in range(shape.tensors)]
        lists[argument.name] = [tensor.to(device) for tensor in grown]
    controls = {name: control.to(device) for name, control in case.controls.items()}
    written = [t for name in operation.writes for t in lists.get(name, ())]
    written += [controls[name] for name in operation.writes if name in controls]
    first = [tensor.clone() for tensor in written]
    return Arguments(operation, lists, controls, options, (written, first))


def _grown(values: Tensor, numel: int) -> Tensor:
    flat = values.reshape(-1)
    return flat.repeat(-(-numel // max(1, flat.numel())))[:numel].clone()


@dataclass
class Subject:
    """Something that is timed in turns.

    Attributes:
        call: does it once.
        restore: makes it ready again, outside the timed part.
        device: where it runs.
        each: it must be made ready before every call, not only before a turn.
        clock: of the host.
        close: ends what it holds.
        repeats: calls in a turn, chosen by `settle`.
    """

    call: Callable[[], object]
    restore: Callable[[], object]
    device: torch.device
    each: bool = False
    clock: Callable[[], float] = time.perf_counter
    close: Callable[[], object] = bool
    repeats: int = 1

    def settle(self) -> None:
        """Warm up, and choose how many calls make a turn long enough to time."""
        for _ in range(3):
            self.restore()
            self.call()
        self.repeats = 1
        seconds = max(min(self.turn(), self.turn()), 1e-7)
        self.repeats = max(1, min(MOST, round(TURN / seconds)))

    def turn(self) -> float:
        """Seconds of one call, the mean of a turn."""
        self.restore()
        return self._on_gpu() if self.device.type == "cuda" else self._on_cpu()

    def _on_cpu(self) -> float:
        taken, begin = 0.0, self.clock()
        for number in range(self.repeats):
            if self.each and number:
                taken += self.clock() - begin
                self.restore()
                begin = self.clock()
            self.call()
        return (taken + self.clock() - begin) / self.repeats

    def _on_gpu(self) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        for _ in range(self.repeats):
            self.call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self.repeats


def turns(subjects: Sequence[Subject], rounds: int) -> list[list[float]]:
    """Seconds of every subject in every round; the order is turned from round to round."""
    found: list[list[float]] = [[] for _ in subjects]
    for number in range(rounds):
        places = list(range(len(subjects)))
        places = places[number % len(places) :] + places[: number % len(places)]
        for place in places if number % 2 else reversed(places):
            found[place].append(subjects[place].turn())
    return found
