"""The table of whole optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from twinstep.parity.records.ledger import Cell, Status

WORDS = {
    Status.PASSED: "[green]ok[/]",
    Status.FAILED: "[bold red]FAIL[/]",
    Status.SKIPPED: "[yellow]skip[/]",
}


def twin_table(cells: Sequence[Cell]) -> Table:
    """Number of sequences that each optimizer kept; what it does not claim is left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("reference", "optimizer", "dtype", "engine", "verdict"):
        table.add_column(heading, overflow="fold")
    table.add_column("sequences", justify="right")
    table.add_column("actions", justify="right")
    for cell in cells:
        if cell.status in WORDS:
            key = cell.key
            table.add_row(
                key.operation,
                key.kernel,
                key.dtype,
                key.engine,
                WORDS[cell.status],
                str(cell.sequences),
                str(cell.calls),
            )
    return table
