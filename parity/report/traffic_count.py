"""Bytes that a call moves, counted by replay by instruction, however many parameters.

Tensors of millions of elements are folded (`replay.folded_tensor`): every block of every
launch is executed, each on its own addresses, but they all use one tile of memory. Counts
are of the whole, nothing is extrapolated. Values are those of the tile, stepped once in each fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import LAYOUTS, Operation, Role
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.report.traffic_design import bytes_by_list

if TYPE_CHECKING:
    from twinstep.replay import Launch

PARAMETERS = 1 << 20
TILE = 1 << 20  # elements of memory of each tensor
PATTERN = 1024  # values drawn; a tile repeats them
PIECES = 3  # tensors of the list layout: one for each dtype of the mixed combination


@dataclass(frozen=True, kw_only=True)
class Count:
    """Counts of one launch.

    Attributes:
        operation: that was called.
        kernel: the registered kernel.
        dtype: combination.
        layout: `flat` or `list`.
        launch: name of the launched Triton kernel.
        grid: blocks.
        parameters: of the call.
        buffers: bytes (read, written) by argument.
        lists: arguments that are parameter-sized.
        design: what `traffic_design` allows, by list argument, shared by launches of one name.
        widths: thread accesses of global memory by ("read" | "write" | "atomic", bytes).
        classes: thread instructions by class.
        shared: bytes of shared memory (read, written).
        barriers: threads that passed one.
        seconds: how long replay took.
    """

    operation: str
    kernel: str
    dtype: str
    layout: str
    launch: str
    grid: int
    parameters: int
    buffers: dict[str, tuple[int, int]]
    lists: frozenset[str]
    design: dict[str, tuple[int, int]] = field(default_factory=dict)
    widths: dict[tuple[str, int], int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    shared: tuple[int, int] = (0, 0)
    barriers: int = 0
    seconds: float = 0.0

    @property
    def read(self) -> int:
        """Bytes read from parameter-sized tensors."""
        return sum(self.buffers[name][0] for name in self.sized)

    @property
    def written(self) -> int:
        """Bytes written to parameter-sized tensors."""
        return sum(self.buffers[name][1] for name in self.sized)

    @property
    def sized(self) -> list[str]:
        """Parameter-sized arguments that the launch touched."""
        return [name for name in self.buffers if name in self.lists]

    @property
    def rest(self) -> int:
        """All other bytes: counters, tables, control values, partial sums."""
        return sum(map(sum, self.buffers.values())) - self.read - self.written


def counted(kernel: Kernel, dtype: str, layout: str, parameters: int = PARAMETERS) -> list[Count]:
    """Call a kernel of ours once on replay; one count for each launch."""
    import twinstep.replay

    call = large_call(kernel.operation, dtype, layout, parameters)
    folded = [t for name in call.sized for t in call.lists[name]]

    def forget() -> None:
        twinstep.replay.forget_pages(*folded)

    twinstep.replay.activate()
    try:
        with (
            twinstep.replay.allow(**call.labels()),
            twinstep.replay.options(after_batch=forget if parameters > TILE else None),
            twinstep.replay.launches() as log,
        ):
            kernel(*call.lists.values(), **call.case.controls, **call.case.options)
    finally:
        twinstep.replay.deactivate()
    return [_count(kernel, dtype, layout, parameters, call, launch) for launch in log]


def _count(
    kernel: Kernel,
    dtype: str,
    layout: str,
    parameters: int,
    call: Call,
    launch: Launch,
) -> Count:
    buffers: dict[str, tuple[int, int]] = {}
    for label, moved in launch.buffers.items():
        name = call.argument_of(label)
        read, written = buffers.get(name, (0, 0))
        buffers[name] = (read + moved.read, written + moved.written)
    operation = kernel.operation
    return Count(
        operation=operation.name,
        kernel=kernel.name,
        dtype=dtype,
        layout=layout,
        launch=launch.kernel,
        grid=launch.grid[0] * launch.grid[1] * launch.grid[2],
        parameters=parameters,
        buffers=buffers,
        lists=frozenset(call.sized),
        design=bytes_by_list(operation.name, launch.kernel, call.lists),
        widths=dict(launch.widths),
        classes=dict(launch.classes),
        shared=(launch.shared_read, launch.shared_written),
        barriers=launch.barriers,
        seconds=launch.seconds,
    )


@dataclass(frozen=True)
class Call:
    """Arguments of one large call: ordinary values, folded."""

    case: Case
    lists: Mapping[str, Sequence[Tensor]]

    @property
    def sized(self) -> list[str]:
        """The list arguments that are as large as the parameters."""
        return [a.name for a in self.case.operation.lists if a.role is not Role.STEPS]

    def labels(self) -> dict[str, Tensor]:
        """A name for every tensor, by which its bytes are found again."""
        names = {
            f"{name}[{index}]": tensor
            for name, tensors in self.lists.items()
            for index, tensor in enumerate(tensors)
        }
        return {**names, **self.case.controls}

    def argument_of(self, label: str) -> str:
        """The argument that a buffer's label stands for; what is no argument keeps its label."""
        known = {*self.lists, *self.case.controls}
        names = [part.partition("[")[0] for part in label.split("/") if "[" in part]
        return next((n for n in [*names, *label.split("/")] if n in known), label)


def large_call(operation: Operation, dtype: str, layout: str, parameters: int) -> Call:
    """The arguments of a call on that many parameters, without gaps between tensors."""
    from twinstep.replay import folded_tensor

    sizes = piece_sizes(parameters, 1 if layout == LAYOUTS[0] else PIECES)
    options = {option.name: option.choices[0] for option in operation.options}
    recipe = Recipe(
        layout=layout,
        sizes=(PATTERN,) * len(sizes),
        regime="ordinary",
        seed=1,
        options=options,
        brink=False,
    )
    case = generate(operation, dtype, recipe)
    lists: dict[str, list[Tensor]] = {}
    for argument in operation.lists:
        small = list(case.lists[argument.name])
        if argument.role is not Role.STEPS:
            wanted = (parameters,) if argument.single else sizes
            small = [
                folded_tensor(_tile(small[0].to(tensor.dtype), numel), numel)
                for tensor, numel in zip(small, wanted, strict=bool(small))
            ]
        lists[argument.name] = small
    return Call(case, lists)


def piece_sizes(parameters: int, pieces: int) -> tuple[int, ...]:
    """Cut into about equal pieces, all but the last a multiple of 16 elements.

    >>> piece_sizes(100, 3)
    (32, 32, 36)
    """
    piece = parameters // pieces // 16 * 16
    return (*[piece] * (pieces - 1), parameters - piece * (pieces - 1))


def _tile(values: Tensor, numel: int) -> Tensor:
    """Ordinary values repeated to a tile; no larger than the tensor needs.

    Half of the first tensor's, and those of no other: the rest is of all regimes, and LAMB reads
    again what fits into no window.
    """
    size = 4 * PATTERN
    while size < min(numel, TILE):
        size *= 2
    return values.reshape(-1)[: PATTERN // 2].repeat(2 * size // PATTERN)
