"""Progress of a run: one line, redrawn on a terminal, printed every ten seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from twinstep.parity.records.ledger import Cell, Key, Status

if TYPE_CHECKING:
    # It imports torch, during which progress is shown.
    from twinstep.parity.runner.session import Task

FIRST, EVERY = 3.0, 10.0
# Earlier than this, what is left cannot be told from what was judged.
SHARE, SECONDS = 0.1, 5.0


class Progress:
    """A line on standard error, between `with` and its end.

    On a terminal it is redrawn in place and vanishes at the end; elsewhere it is printed after
    three seconds and then every ten, so that a short run leaves nothing behind.
    """

    def __init__(self) -> None:
        self.screen = Console(stderr=True, highlight=False, markup=False)
        self._what, self._began = "", time.monotonic()
        self._text: Callable[[], str] = self._phase
        self._stopped = threading.Event()
        self._spinner = Spinner("dots")
        # A dumb terminal cannot redraw a line.
        moving = self.screen.is_terminal and not self.screen.is_dumb_terminal
        self._live = (
            Live(console=self.screen, get_renderable=self._line, transient=True) if moving else None
        )
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        # A fork of this process would find the locks of a thread that is still printing.
        if self._thread.is_alive():
            self._thread.join()

    def stop(self) -> None:
        """Show nothing more; may be called twice, and by any thread."""
        self._stopped.set()
        if self._live:
            self._live.stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Show nothing inside, where something else prints."""
        if self._live:
            self._live.stop()
        yield
        if self._live and not self._stopped.is_set():
            self._live.start()

    def phase(self, what: str) -> None:
        """Show this, and how long it has taken."""
        self._what, self._began, self._text = what, time.monotonic(), self._phase

    def follow(self, text: Callable[[], str]) -> None:
        """Show what this function returns whenever the line is drawn."""
        self._text = text

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.screen.print(text, soft_wrap=True)

    def _phase(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{self._what}, {seconds:.0f} s" if self._what and seconds >= 2 else self._what

    def _line(self) -> Spinner | Text:
        text = self._text()
        if not text:
            return Text("")
        self._spinner.update(text=Text(text))
        return self._spinner

    def _repeat(self) -> None:
        pause = FIRST
        while not self._stopped.wait(pause):
            pause = EVERY
            if text := self._text():
                self.note(text)


class JudgedCells:
    """Number of cells that are judged, and the time that the others will take.

    What a law takes is learnt from the cells judged by it, in proportion to what their operation
    has to draw and compare; how many are judged at once, from the time that all took together.
    """

    def __init__(self, expected: Sequence[Task]) -> None:
        self.expected = tuple(task.key for task in expected)
        self._left = set(self.expected)
        self._weights = {task.key.operation: float(task.work) for task in expected}
        self.total = len(self._left)
        self._took: dict[str, tuple[float, float]] = {}
        self._began = time.monotonic()
        self._first: float | None = None
        self.now = ""

    @property
    def done(self) -> int:
        """Number of expected cells that are on record."""
        return self.total - len(self._left)

    def _weight(self, key: Key) -> float:
        return self._weights.get(key.operation, 1.0)

    def add(self, cell: Cell) -> None:
        """Take note of a finished cell."""
        self._left.discard(cell.key)
        if cell.status is Status.NOT_CLAIMED:
            return
        # The first one pays for what is imported and compiled on the way.
        if self._first is None:
            self._first = time.monotonic()
        else:
            seconds, weight = self._took.get(cell.key.law, (0.0, 0.0))
            took = (seconds + cell.seconds, weight + self._weight(cell.key))
            self._took[cell.key.law] = took

    def left(self) -> float | None:
        """Estimate of the seconds that are left; None while there is nothing to go by."""
        if self._first is None:
            return None
        elapsed = time.monotonic() - self._first
        took = self._took.copy()
        worked = sum(seconds for seconds, _ in took.values())
        if not worked or self.done < SHARE * self.total or elapsed < SECONDS:
            return None
        usual = worked / sum(weight for _, weight in took.values())
        rates = {law: seconds / weight for law, (seconds, weight) in took.items()}
        ahead = sum(rates.get(key.law, usual) * self._weight(key) for key in self._left.copy())
        return elapsed * ahead / worked

    def text(self) -> str:
        """The line: how many cells, how long, and the row in work."""
        left = self.left()
        seconds = time.monotonic() - self._began
        when = f"{seconds:.0f} s so far" if left is None else f"about {duration(left)} left"
        now = f"judging {self.now}: " if self.now else "importing and compiling: "
        return f"{now}{self.done} of {self.total} cells, {when}"


def duration(seconds: float) -> str:
    """A length of time as coarse as an estimate is."""
    if seconds < 60:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{seconds / 60:.0f} min"


@contextmanager
def during(what: str) -> Iterator[Progress]:
    """Progress over one phase, an import for instance."""
    with Progress() as line:
        line.phase(what)
        yield line


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Progress over pieces of known number.

    Yields a function of a description and how much more is done.
    """
    done, began = 0, time.monotonic()
    what = ""

    def text() -> str:
        left = duration((time.monotonic() - began) * (total - done) / done) if done else ""
        return f"{what or 'starting'}: {done} of {total}" + (f", about {left} left" if left else "")

    def told(description: str, more: int) -> None:
        nonlocal what, done
        what, done = description, done + more

    with Progress() as line:
        line.follow(text)
        yield told
