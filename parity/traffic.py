"""Bytes per parameter, counted by replay instruction by instruction on a large flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from parity.case import Case, Recipe
from parity.errors import UsageError
from parity.expand import expand
from parity.registry import Kernel, kernels
from parity.session import Selection

PARAMETERS = 1 << 20
MEASURED = (("adamw_step", "bf16"), ("mixed_step", "bf16"), ("mixed_step", "fp16"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Traffic of one launch, in bytes per parameter.

    Attributes:
        operation: that was called.
        dtype: combination.
        launch: name of the launched kernel.
        read: from buffers as large as the parameters.
        written: to buffers as large as the parameters.
        rest: all other bytes: counters, tables, control values, partial sums.
    """

    operation: str
    dtype: str
    launch: str
    read: float
    written: float
    rest: float


def measured(operation: str, dtype: str, parameters: int = PARAMETERS) -> list[Row]:
    """Call our kernel of an operation once on a flat buffer; one row for each launch."""
    import parity.replay

    kernel = next(row for row in kernels() if row.name == f"triton.{operation}")
    lists, controls, options = _arguments(kernel, dtype, parameters)
    parity.replay.activate()
    try:
        with parity.replay.launches() as log:
            kernel(*lists, **controls, **options)
    finally:
        parity.replay.deactivate()
    rows = []
    for launch in log:
        big = [b for b in launch.buffers.values() if b.read + b.written >= parameters]
        read, written = sum(b.read for b in big), sum(b.written for b in big)
        rest = launch.bytes_read + launch.bytes_written - read - written
        rows.append(
            Row(
                operation=operation,
                dtype=dtype,
                launch=launch.kernel,
                read=read / parameters,
                written=written / parameters,
                rest=rest / parameters,
            )
        )
    return rows


def _arguments(
    kernel: Kernel, dtype: str, parameters: int
) -> tuple[Sequence[list[Tensor]], dict[str, Tensor], dict[str, object]]:
    """Ordinary values of that size; no guards, because bytes are counted by buffer."""
    case = _small(kernel, dtype)
    lists: list[list[Tensor]] = []
    for argument in kernel.operation.lists:
        tensors = list(case.lists[argument.name])
        flat = [t for t in tensors if t.dim() == 1]
        lists.append([t.repeat(parameters // t.numel()) for t in flat] or tensors)
    return lists, dict(case.controls), dict(case.options)


def _small(kernel: Kernel, dtype: str) -> Case:
    options = {option.name: option.choices[0] for option in kernel.operation.options}
    recipe = Recipe(layout="flat", sizes=(1024,), regime="ordinary", seed=1, options=options)
    return expand(kernel.operation, dtype, recipe)


def print_traffic(screen: Console, chosen: Selection) -> None:
    """Print the table of bytes per parameter for the selected operations."""
    wanted = [
        (operation, dtype)
        for operation, dtype in MEASURED
        if not chosen.operations or operation in chosen.operations
    ]
    if not wanted or chosen.names or chosen.laws:
        return
    try:
        rows = [row for operation, dtype in wanted for row in measured(operation, dtype)]
    except (ImportError, UsageError) as error:
        screen.print(f"bytes per parameter: not counted, {error}", highlight=False)
        return
    screen.print(traffic_table(rows))


def traffic_table(rows: Sequence[Row]) -> Table:
    """Bytes per parameter, one line for each launch."""
    table = Table(
        title=f"bytes per parameter, {PARAMETERS} parameters, counted by replay",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("operation", "dtype", "launch"):
        table.add_column(heading)
    for heading in ("read", "written", "parameter-sized", "the rest"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.operation,
            row.dtype,
            row.launch,
            f"{row.read:.1f}",
            f"{row.written:.1f}",
            f"{row.read + row.written:.1f}",
            f"{row.rest:.4f}",
        )
    return table
