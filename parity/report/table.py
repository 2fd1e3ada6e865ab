"""Tables and progress on the screen.

The table that a run ends with: operation x kernel x dtype, a column for each law.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.sequences.table import twin_table

MARKS = {
    Status.PASSED: ("ok", "green"),
    Status.FAILED: ("FAIL", "bold red"),
    Status.NOT_CLAIMED: ("-", "dim"),
    Status.SKIPPED: ("skip", "yellow"),
    Status.EXPECTED_FAILURE: ("xfail", "yellow"),
}
# Of an instruction its opcode is enough here; the registers differ from dtype to dtype.
OPERANDS = re.compile(r"`(?:@\S+ )?([a-z][\w.:]*\.\w+) [^`]*`")
# Four characters each: with all laws a row must fit into a terminal.
HEADINGS = {
    "value": "val",
    "formula": "fp64",
    "nothing_else_written": "else",
    "every_output_written": "out",
    "skipped_step": "skip",
    "after_skip": "next",
    "non_finite": "inf",
    "boundary_sizes": "size",
    "alignment": "algn",
    "strided": "strd",
    "permutation": "perm",
    "splitting": "splt",
    "sign_symmetry": "sign",
    "power_of_two": "2^k",
    "repeat": "rept",
    "race_free": "race",
    "large_index": "2^31",
    "no_host_read": "host",
    "graph_capture": "grph",
}


def law_table(ledger: Ledger) -> Table:
    """All cells; a row whose dtype is not claimed at all is left out, and counted below."""
    laws = _laws(ledger)
    # The box itself puts one space between columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in ("kernel", "dtype", "engine"):
        table.add_column(heading, no_wrap=True)
    for law in laws:
        table.add_column(HEADINGS.get(law, law), justify="center", no_wrap=True)
    table.add_column("error/\nbound", justify="right")
    before: tuple[str, str] = ("", "")
    for (operation, kernel, dtype, engine), cells in _rows(ledger).items():
        if all(cell.status is Status.NOT_CLAIMED for cell in cells.values()):
            continue
        if operation != before[0]:
            table.add_row(Text(operation, style="bold"))
        marks = [_mark(cells.get(law)) for law in laws]
        first = f"  {kernel}" if (operation, kernel) != before else ""
        table.add_row(first, dtype, engine, *marks, _worst(cells))
        before = (operation, kernel)
    return table


def _laws(ledger: Ledger) -> list[str]:
    """Laws that any cell is about, in their order."""
    asked = {key.law for key in ledger.cells}
    return [law for law in LAWS if law in asked]


def legend(ledger: Ledger) -> str:
    """Meaning of the headings."""
    return ", ".join(f"{HEADINGS.get(law, law)} {law}" for law in _laws(ledger))


Row = tuple[str, str, str, str]


def _rows(ledger: Ledger) -> dict[Row, dict[str, Cell]]:
    rows: dict[Row, dict[str, Cell]] = {}
    for key, cell in ledger.cells.items():
        if key.law in LAWS:
            rows.setdefault(_row(key), {})[key.law] = cell
    return rows


def _row(key: Key) -> Row:
    return key.operation, key.kernel, key.dtype, key.engine


def _mark(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    word, style = MARKS[cell.status]
    return Text(word, style=style)


def _worst(cells: dict[str, Cell]) -> str:
    ratios = [ratio for cell in cells.values() for ratio in cell.worst.values()]
    return f"{max(ratios):.2f}" if ratios else ""


def bound_lines(ledger: Ledger) -> list[str]:
    """Worst error over bound by output, a line for each kernel and dtype that has bounds."""
    lines = []
    for (_, kernel, dtype, engine), cells in _rows(ledger).items():
        worst: dict[str, float] = {}
        for cell in cells.values():
            for name, ratio in cell.worst.items():
                worst[name] = max(ratio, worst.get(name, 0.0))
        if worst:
            ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items())
            lines.append(f"error/bound: {kernel} {dtype} {engine}: {ratios}")
    return lines


def print_table(console: Console, ledger: Ledger) -> None:
    """Print the table, worst errors, the reasons of what was skipped, and the counts."""
    whole = [cell for cell in ledger.cells.values() if cell.key.law not in LAWS]
    if len(whole) < len(ledger.cells) or not whole:
        console.print(law_table(ledger))
        console.print(f"laws: {legend(ledger)}", style="dim", highlight=False)
    if whole:
        console.print(twin_table(whole))
    for line in bound_lines(ledger):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for reason, cells in _reasons(ledger).items():
        console.print(f"skip: {reason} ({cells} cells)", highlight=False, markup=False)
    counts = ledger.counts()
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    console.print(f"{len(ledger.declared)} cells declared: {', '.join(parts)}", highlight=False)


def _reasons(ledger: Ledger) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for cell in ledger.with_status(Status.SKIPPED, Status.EXPECTED_FAILURE):
        reason = OPERANDS.sub(r"`\1`", cell.reason)
        reasons[reason] = reasons.get(reason, 0) + 1
    return reasons


@contextmanager
def progress(screen: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a line on a terminal and nothing elsewhere.

    Yields a function of a description and how much more is done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not screen.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=screen, transient=True, disable=hidden
    ) as bar:
        line = bar.add_task("", total=total)
        yield lambda what, done: bar.update(line, description=what, advance=done)


def plain_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without frame; columns of numbers are on the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    return table
