"""Progress of runs: one moving line on a terminal, plain lines to a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twinstep.scenarios.trace import StepRecord

HEADING = "step    loss       scale   gradient norm"


class Lines:
    """Plain lines, flushed, so that a pipe sees progress too.

    Args:
        every: steps between two lines; the last step is always shown.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._steps = self._skipped = 0

    def begin(self, label: str, steps: int) -> None:
        """Print what is run, and the heading of the columns."""
        self._steps, self._skipped = steps, 0
        print(f"{label}\n{HEADING}", flush=True)

    def step(self, record: StepRecord) -> None:
        """Print the step, if it is its turn."""
        self._skipped += record.skipped
        if record.step % self.every and record.step != self._steps:
            return
        note = "  skipped: the gradients overflowed" if record.skipped else ""
        if self.every > 1:
            note = f"  {self._skipped} skipped"
        line = f"{record.step:4d}  {record.loss:6.4f}  {record.scale:10g}  {record.norm:14.6g}"
        print(line + note, flush=True)


class Live:
    """One line for each run, redrawn in place: a bar, loss, scale, norm, skipped steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", visible=False, says="")
        self._skipped = 0

    def begin(self, label: str, steps: int) -> None:
        """Add a line."""
        self._skipped = 0
        self._task = self._progress.add_task(label, total=steps, says="")

    def step(self, record: StepRecord) -> None:
        """Redraw the line of the run."""
        self._skipped += record.skipped
        says = (
            f"loss {record.loss:6.4f}  scale {record.scale:g}  norm {record.norm:.3g}  "
            f"{self._skipped} skipped"
        )
        self._progress.update(self._task, completed=record.step, says=says)


@contextmanager
def reporter(screen: Console, every: int = 1) -> Iterator[Lines | Live]:
    """`Live` on a terminal; elsewhere `Lines`, one in `every` steps."""
    if not screen.is_terminal:
        yield Lines(every)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[says]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen) as progress:
        yield Live(progress)
