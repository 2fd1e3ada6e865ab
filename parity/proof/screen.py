"""What the gates' commands show: one line of progress, and plain tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


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
