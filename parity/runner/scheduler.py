"""Judge many kernels, on one process or several; a kernel that kills its own kills nothing else.

Each worker loads the kernels itself (ours, or a user's file) and judges whole rows of the table,
one kernel with one dtype combination, so that what is compiled once serves all laws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace

import torch

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.registry.engines import Engine, engine_for, running
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.fork_server import fresh_processes
from twinstep.parity.runner.judge_cell import Effort, judge_cell
from twinstep.parity.runner.load_file import load_file

WORTH_IT = 50


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
        progress: called before each cell.
        finished: called with each finished cell.
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


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of the kernels.

    Attributes:
        file: a user's file; None means ours.
    """

    file: str | None = None

    def kernels(self) -> Sequence[Kernel]:
        """Load them in this process."""
        if self.file is not None:
            return load_file(self.file).kernels
        register_house()
        return kernels()


def jobs_for(planned: Sequence[Task], asked: int | None) -> int:
    """Number of processes: one for little work and on a GPU, otherwise one for each core."""
    if asked is not None:
        return max(1, asked)
    claimed = sum(task.dtype in task.kernel.dtypes for task in planned)
    if claimed < WORTH_IT or any(task.engine.name == "cuda" for task in planned):
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 8)


_worker: list[tuple[Session, list[Task]]] = []


def _start(source: Source, selection: Selection, effort: Effort) -> None:
    """Prepare a worker process."""
    torch.set_num_threads(1)
    planned = tasks(selection, source.kernels())
    _worker[:] = [(Session(selection=selection, effort=effort), planned)]


def _row(places: Sequence[int]) -> list[Cell]:
    """Judge some cells in a worker."""
    session, planned = _worker[0]
    return [session.cell(planned[place]) for place in places]


def run(
    source: Source,
    selection: Selection,
    effort: Effort,
    *,
    known: Sequence[Kernel],
    jobs: int | None = None,
    progress: Progress = silent,
    finished: Callable[[Cell], None] = lambda cell: None,
) -> Ledger:
    """Judge the selection, on several processes where that is worth it.

    Args:
        source: where workers get the kernels from.
        selection: what to judge.
        effort: how hard.
        known: the kernels, as loaded in this process.
        jobs: number of processes; None chooses.
        progress: called before each cell, or after each row of cells.
        finished: called with each finished cell.
    """
    planned = tasks(selection, known)
    count = jobs_for(planned, jobs)
    session = Session(selection=selection, effort=effort, progress=progress, finished=finished)
    if count == 1:
        return session.run(known)
    ledger = session.ledger(planned)
    # The most work first: a worker should not be left alone with a long row at the end.
    rows = sorted(_rows(planned).values(), key=lambda row: _work(planned[row[0]]), reverse=True)
    done = 0
    for places, cells in _judged(rows, planned, count, (source, selection, effort)):
        done += len(places)
        for cell in cells:
            ledger.add(cell)
            finished(cell)
        progress(planned[places[-1]], done, len(planned))
    return ledger.sorted()


def _work(task: Task) -> int:
    """A measure of how long a row takes: how much its operation must draw and compare."""
    operation = task.kernel.operation
    claimed = task.dtype in task.kernel.dtypes
    return claimed * len(operation.laws) * (len(operation.controls) + 4 * len(operation.lists))


def _rows(planned: Sequence[Task]) -> dict[tuple[str, str], list[int]]:
    rows: dict[tuple[str, str], list[int]] = {}
    for place, task in enumerate(planned):
        rows.setdefault((task.kernel.name, task.dtype), []).append(place)
    return rows


Start = tuple[Source, Selection, Effort]


def _pool(count: int, start: Start) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        count, mp_context=fresh_processes(), initializer=_start, initargs=start
    )


def _judged(
    rows: list[list[int]], planned: Sequence[Task], count: int, start: Start
) -> Iterator[tuple[list[int], list[Cell]]]:
    """Judge rows; those that were under way when a worker died are tried again, one by one."""
    orphans: list[list[int]] = []
    with _pool(count, start) as pool:
        pieces = [*_early(rows[:count]), *rows[count:]]
        waiting: dict[Future[list[Cell]], list[int]] = {pool.submit(_row, p): p for p in pieces}
        for future in as_completed(waiting):
            try:
                yield waiting[future], future.result()
            except BrokenProcessPool:
                orphans.append(waiting[future])
    yield from _again(orphans, planned, start)


def _early(rows: list[list[int]]) -> list[list[int]]:
    """The first law of each row alone, then the others: somebody may be waiting for a verdict."""
    return [part for half in (slice(0, 1), slice(1, None)) for row in rows if (part := row[half])]


def _again(
    orphans: list[list[int]], planned: Sequence[Task], start: Start
) -> Iterator[tuple[list[int], list[Cell]]]:
    """Judge rows on one process at a time; in a row that kills it, each cell has its own."""
    while orphans:
        with _pool(1, start) as pool:
            try:
                while orphans:
                    yield orphans[0], pool.submit(_row, orphans[0]).result()
                    orphans.pop(0)
            except BrokenProcessPool:
                for place in orphans.pop(0):
                    yield [place], [_alone(place, planned[place], start)]


def _alone(place: int, task: Task, start: Start) -> Cell:
    """Judge one cell in a process of its own."""
    with _pool(1, start) as pool:
        try:
            (cell,) = pool.submit(_row, [place]).result()
        except BrokenProcessPool:
            says = f"{task.kernel.name} [{task.dtype}] breaks `{task.law}`: it killed its process"
            return Cell(key=task.key, status=Status.FAILED, failure=says)
        return cell
