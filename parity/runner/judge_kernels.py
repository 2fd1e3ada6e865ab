"""Judge many kernels: declare the cells, run them one by one, fill the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.registry.engines import Engine, engine_for, running
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.judge_cell import Effort, judge_cell


@dataclass(frozen=True, kw_only=True)
class Task:
    """One cell to be run."""

    kernel: Kernel
    dtype: str
    law: str
    engine: Engine

    @property
    def key(self) -> Key:
        """Names the cell."""
        return Key(
            operation=self.kernel.operation.name,
            kernel=self.kernel.name,
            dtype=self.dtype,
            law=self.law,
            engine=self.engine.name,
        )


def tasks(selection: Selection, known: Sequence[Kernel]) -> list[Task]:
    """Every declared cell of the selection: all dtype combinations, all laws of the operation."""
    found = []
    for kernel in selection.kernels(known):
        engine = engine_for(kernel, selection.engine)
        for dtype in kernel.operation.combinations:
            if selection.dtypes and dtype not in selection.dtypes:
                continue
            found += [
                Task(kernel=kernel, dtype=dtype, law=law, engine=engine)
                for law in kernel.operation.laws
                if not selection.laws or law in selection.laws
            ]
    return found


Progress = Callable[[Task, int, int], None]


def silent(task: Task, done: int, of: int) -> None:
    """Show nothing."""


def forget(cell: Cell) -> None:
    """Keep nothing."""


@dataclass
class Session:
    """A run over a selection.

    Attributes:
        selection: what to judge.
        effort: how hard.
        progress: told before each cell.
        finished: told each finished cell.
    """

    selection: Selection = field(default_factory=Selection)
    effort: Effort = field(default_factory=Effort)
    progress: Progress = silent
    finished: Callable[[Cell], None] = forget

    def __post_init__(self) -> None:
        # Laws of one row share calls; the next row starts anew.
        self._row: tuple[str, str, str] | None = None
        self._cache = CallCache()

    def ledger(self, planned: Sequence[Task]) -> Ledger:
        """An empty ledger that declares these cells."""
        declared = tuple(task.key for task in planned)
        return Ledger(declared=declared, asked_device=self.selection.engine)

    def run(self, known: Sequence[Kernel]) -> Ledger:
        """Judge the selected kernels among the known ones."""
        planned = tasks(self.selection, known)
        ledger = self.ledger(planned)
        for done, task in enumerate(planned):
            self.progress(task, done, len(planned))
            cell = self.cell(task)
            ledger.add(cell)
            self.finished(cell)
        return ledger

    def cell(self, task: Task) -> Cell:
        """Judge one cell."""
        if task.dtype not in task.kernel.dtypes:
            reason = f"{task.kernel.name} does not claim {task.dtype}"
            return Cell(key=task.key, status=Status.NOT_CLAIMED, reason=reason)
        row = (task.kernel.name, task.dtype, task.engine.name)
        if self._row != row:
            self._row, self._cache = row, CallCache()
        law = LAWS[task.law]
        with running(task.engine):
            cell = judge_cell(task.kernel, task.dtype, law, task.engine, self.effort, self._cache)
        return replace(cell, arithmetic=task.kernel.arithmetic)
