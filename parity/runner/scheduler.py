"""Judge many cells on several processes; a kernel that kills its own kills nothing else.

Each worker loads the kernels itself (ours, or a user's file) and judges whole rows of the table,
one kernel with one dtype combination, so that what is compiled once serves all laws.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.fork_server import fresh_processes
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import (
    KernelTask,
    Progress,
    Session,
    Task,
    forget,
    given_up_after,
    planned,
    silent,
)
from twinstep.parity.runner.source import Opened, Source

WORTH_IT = 50


def jobs_for(tasks: Sequence[Task], asked: int | None) -> int:
    """Number of processes: one for little work and on a GPU, otherwise one for each core."""
    if asked is not None:
        return max(1, asked)
    claimed = sum(task.claimed for task in tasks)
    if claimed < WORTH_IT or any(task.engine.name == "cuda" for task in tasks):
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 8)


_worker: list[tuple[Session, list[Task]]] = []


def _start(source: Source, selection: Selection, effort: Effort) -> None:
    """Prepare a worker process."""
    # Ctrl-C is for the process that can say something about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    opened = source.open()
    session = Session(selection=selection, effort=effort, subject=opened.subject)
    _worker[:] = [(session, planned(selection, opened.kernels, opened.optimizers))]


def _row(places: Sequence[int]) -> list[Cell]:
    """Judge some cells in a worker."""
    session, tasks = _worker[0]
    return [session.cell(tasks[place]) for place in places]


def run(
    source: Source,
    selection: Selection,
    effort: Effort,
    *,
    opened: Opened | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
    finished: Callable[[Cell], None] = forget,
) -> Ledger:
    """Judge the selection, on several processes where that is worth it.

    Args:
        source: of the kernels and optimizers.
        selection: what to judge.
        effort: how hard.
        opened: the source, where it has been opened in this process already.
        jobs: number of processes; None chooses.
        progress: called before each cell, or after each row of cells.
        finished: called with each finished cell.
    """
    here = opened or source.open()
    tasks = planned(selection, here.kernels, here.optimizers)
    count = jobs_for(tasks, jobs)
    session = Session(
        selection=selection,
        effort=effort,
        progress=progress,
        finished=finished,
        subject=here.subject,
    )
    if count == 1:
        return session.run(here.kernels, here.optimizers)
    ledger = session.ledger(tasks)
    # The most work first: a worker should not be left alone with a long row at the end.
    rows = sorted(_rows(tasks).values(), key=lambda row: _work(tasks[row[0]]), reverse=True)
    done = 0
    for places, cells in _judged(rows, tasks, count, (source, selection, effort)):
        done += len(places)
        for cell in cells:
            ledger.add(cell)
            finished(cell)
        progress(tasks[places[-1]].key, done, len(tasks))
    return ledger.sorted()


def _work(task: Task) -> int:
    return task.claimed * task.work


def _rows(tasks: Sequence[Task]) -> dict[tuple[str, str], list[int]]:
    rows: dict[tuple[str, str], list[int]] = {}
    for place, task in enumerate(tasks):
        rows.setdefault((task.key.kernel, task.dtype), []).append(place)
    return rows


Start = tuple[Source, Selection, Effort]


def _pool(count: int, start: Start) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        count, mp_context=fresh_processes(), initializer=_start, initargs=start
    )


def _judged(
    rows: list[list[int]], tasks: Sequence[Task], count: int, start: Start
) -> Iterator[tuple[list[int], list[Cell]]]:
    """Judge rows; those that were under way when a worker died are tried again, one by one."""
    orphans: list[list[int]] = []
    hanging: dict[str, str] = {}
    with _pool(count, start) as pool:
        pieces = [*_early(rows[:count]), *rows[count:]]
        waiting: dict[Future[list[Cell]], list[int]] = {pool.submit(_row, p): p for p in pieces}
        for future in as_completed(waiting):
            places = waiting[future]
            try:
                cells = future.result()
            except BrokenProcessPool:
                orphans.append(places)
                continue
            except CancelledError:
                reason = hanging[tasks[places[0]].key.kernel]
                cells = [_not_called(tasks[place], reason) for place in places]
            yield places, cells
            for cell in cells:
                if cell.fatal == "hang":
                    hanging[cell.key.kernel] = given_up_after(cell.key, everywhere=True)
                    for other, theirs in waiting.items():
                        if tasks[theirs[0]].key.kernel == cell.key.kernel:
                            other.cancel()
    yield from _again(orphans, tasks, start)


def _not_called(task: Task, reason: str) -> Cell:
    status = Status.CANNOT_JUDGE if task.claimed else Status.NOT_CLAIMED
    said = reason if task.claimed else f"{task.key.kernel} does not claim {task.dtype}"
    return Cell(key=task.key, status=status, reason=said)


def _early(rows: list[list[int]]) -> list[list[int]]:
    """The first law of each row alone, then the others: somebody may be waiting for a verdict."""
    return [part for half in (slice(0, 1), slice(1, None)) for row in rows if (part := row[half])]


def _again(
    orphans: list[list[int]], tasks: Sequence[Task], start: Start
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
                    yield [place], [_alone(place, tasks[place], start)]


def _alone(place: int, task: Task, start: Start) -> Cell:
    """Judge one cell in a process of its own."""
    with _pool(1, start) as pool:
        try:
            (cell,) = pool.submit(_row, [place]).result()
        except BrokenProcessPool:
            key, (source, *_) = task.key, start
            if source.file is not None or not isinstance(task, KernelTask):
                return _not_called(task, "the judge's own process ended, not the kernel's")
            says = f"{key.kernel} [{key.dtype}] breaks `{key.law}`: it killed its process"
            return Cell(key=key, status=Status.FAILED, failure=says)
        return cell
