"""One call that can be timed again and again: an operation's arguments at some size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import LAYOUTS, ListArgument, Operation, Role
from twinstep.parity.report.traffic_design import DESIGN, bytes_by_list

PATTERN = 1024  # values drawn; a tensor repeats them
TURN = 0.004  # seconds that one turn takes at least
MOST = 64  # calls in a turn
WARM_UP = 5  # calls before the first turn that counts, two of them at least
WARM = 0.1  # seconds of warming up, after which two are enough
REST = 0.001  # seconds in which the threads of an earlier call fall asleep


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
        lists: tensors by argument, each allocated by itself as parameters of a model are.
        controls: 0-dim tensors by argument.
        options: plain values by argument.
        first: what lists and controls held at first; tensors of equal values share one original.
    """

    operation: Operation
    lists: Mapping[str, list[Tensor]]
    controls: Mapping[str, Tensor]
    options: Mapping[str, object]
    first: Mapping[str, Sequence[Tensor]]

    def again(self) -> Arguments:
        """The same with tensors of their own; only the first values are shared."""
        lists = {name: [value.clone() for value in self.first[name]] for name in self.lists}
        controls = {name: self.first[name][0].clone() for name in self.controls}
        return replace(self, lists=lists, controls=controls)

    @cached_property
    def kept(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that the operation writes, and what they held at first."""
        all_of = {**self.lists, **{name: [control] for name, control in self.controls.items()}}
        names = [name for name in all_of if name in self.operation.writes]
        written = [tensor for name in names for tensor in all_of[name]]
        return written, [value for name in names for value in self.first[name]]

    def restore(self) -> None:
        """Put the first values back: repeated steps would reach infinities or subnormals."""
        written, first = self.kept
        if written:
            torch._foreach_copy_(written, first)

    def call(self, kernel: Callable[..., object]) -> None:
        """Call a kernel with them."""
        kernel(*self.lists.values(), **self.controls, **self.options)

    @property
    def read_and_written(self) -> tuple[int, int]:
        """Bytes that must be read and written, at least; of an unknown operation each list once."""
        name = self.operation.name
        passes = [
            both
            for one in DESIGN.get(name, ())
            for both in bytes_by_list(name, one.launch, self.lists).values()
        ]
        passes = passes or [self._moved(argument) for argument in self.operation.lists]
        return sum(read for read, _ in passes), sum(written for _, written in passes)

    def _moved(self, argument: ListArgument) -> tuple[int, int]:
        tensors = self.lists[argument.name]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        written = argument.name in self.operation.writes and argument.role is not Role.STEPS
        return size * (argument.role is not Role.OUTPUT), size * written


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
        brink=False,
    )
    case = generate(operation, dtype, recipe)
    first: dict[str, list[Tensor]] = {}
    for argument in operation.lists:
        small = list(case.lists[argument.name])
        count = shape.tensors
        if own or not small:
            count, origins = len(small), small
        elif argument.role is Role.STEPS:
            origins = small[:1]
        elif argument.single:
            count, origins = 1, [_grown(small[0], shape.numel)]
        else:
            origins = [_grown(values, shape.each) for values in small]
        origins = [tensor.to(device) for tensor in origins]
        first[argument.name] = [origins[at % len(origins)] for at in range(count)]
    controls = {name: control.to(device) for name, control in case.controls.items()}
    kept = {**first, **{name: [control] for name, control in controls.items()}}
    return Arguments(operation, first, controls, options, kept).again()


def _grown(values: Tensor, numel: int) -> Tensor:
    flat = values.reshape(-1)
    return flat.repeat(-(-numel // max(1, flat.numel())))[:numel]


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
        seconds: of a call, as `settle` found them.
        choices: threads of torch that `settle` tries; none for as many as torch took at first.
        turned: turns taken.
        threads: of torch in its calls, chosen by `settle`; 0 for as many as torch took at first.
        parts: seconds of the last call by phase, where it times them itself.
    """

    call: Callable[[], object]
    restore: Callable[[], object]
    device: torch.device
    each: bool = False
    clock: Callable[[], float] = time.perf_counter
    close: Callable[[], object] = bool
    repeats: int = 1
    seconds: float = 0.0
    choices: tuple[int, ...] = ()
    threads: int = 0
    turned: int = 0
    parts: Callable[[], Mapping[str, float]] = dict

    def settle(self) -> None:
        """Warm up, and choose threads and how many calls make a turn long enough to time."""
        self.repeats = 1
        taken: dict[int, float] = {}
        for threads in dict.fromkeys(self.choices or (usual_threads(),)):
            self.threads = threads
            taken[threads] = self._warmed()
        self.threads = min(taken, key=taken.__getitem__)
        self.seconds = taken[self.threads]
        self.repeats = max(1, min(MOST, round(TURN / max(self.seconds, 1e-7))))

    def _warmed(self) -> float:
        """Seconds of a call, once it has settled."""
        taken = [self.turn()]
        while len(taken) < WARM_UP and (self.turned < 2 or sum(taken) < WARM):
            taken.append(self.turn())
        return min(taken[-2:])

    def turn(self) -> float:
        """Seconds of one call, the mean of a turn."""
        self.make_ready()
        self.turned += 1
        return self._on_gpu() if self.device.type == "cuda" else self._on_cpu()

    def make_ready(self) -> None:
        """Take the threads that were chosen, and put the first values back."""
        on_cpu, threads = self.device.type == "cpu", self.threads or usual_threads()
        if on_cpu and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self.restore()
        if on_cpu:
            time.sleep(REST)

    def _on_cpu(self) -> float:
        taken, begin = 0.0, self.clock()
        for number in range(self.repeats):
            if self.each and number:
                taken += self.clock() - begin
                self.make_ready()
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


@cache
def usual_threads() -> int:
    """Threads that torch had in this process before any row chose its own."""
    return torch.get_num_threads()
