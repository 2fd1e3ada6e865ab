"""The commands' work: run a session with progress, print the table, write the reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from rich.console import Console

from twinstep.parity.cli.interrupt import before_the_end
from twinstep.parity.prove import rows as proofs
from twinstep.parity.records.errors import EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.registry.engines import require, require_live_subnormals
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.declared_cells import declared_floor, not_judged
from twinstep.parity.report.exports import as_json, as_junit, write
from twinstep.parity.report.progress import JudgedCells, Progress
from twinstep.parity.report.table import (
    last_line,
    print_diagnoses,
    print_table,
)
from twinstep.parity.report.traffic import print_traffic, traffic_of
from twinstep.parity.report.traffic_count import Count
from twinstep.parity.report.words import print_hanging
from twinstep.parity.runner.fork_server import beside
from twinstep.parity.runner.recipes import EXAMPLES, Effort
from twinstep.parity.runner.scheduler import run
from twinstep.parity.runner.session import beside_optimizers, planned
from twinstep.parity.runner.source import Opened, Source

# Ours claim up to seven dtype combinations with the same source; two of them see 12 recipes in all.
HOUSE_EXAMPLES = 6


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files and screen that get the results, and the number of processes that make them."""

    json: str | None = None
    junitxml: str | None = None
    jobs: int | None = None
    verbose: bool = False

    @property
    def shared(self) -> bool:
        """True if processes beside the workers are allowed: no count is given, no GPU is here."""
        return self.jobs is None and not torch.cuda.is_available()

    @property
    def screen(self) -> Console:
        """The console for people: standard error where JSON takes standard output."""
        return Console(stderr=self.json == "-")


Flag = Sequence[str] | None


def selection(op: Flag, kernel: Flag, dtype: Flag, law: Flag, engine: str | None) -> Selection:
    """The selection that the flags stand for.

    Raises:
        NoDeviceError: the engine is missing.
        UsageError: the engine is unknown.
    """
    if engine is not None:
        require(engine)
    return Selection(
        operations=tuple(op or ()),
        names=tuple(kernel or ()),
        dtypes=tuple(dtype or ()),
        laws=tuple(law or ()),
        engine=engine,
    )


def effort(
    examples: int | None, seed: int | None, quick: bool, usual: int = EXAMPLES, spread: bool = False
) -> Effort:
    """The effort that the flags ask for."""
    drawn = examples if examples is not None else (EXAMPLES // 3 if quick else usual)
    return Effort(examples=drawn, seed=seed, spread=spread)


def judge_house(
    chosen: Selection, examples: int | None, seed: int | None, quick: bool, outputs: Outputs
) -> int:
    """`parity run`; the exit code."""
    require_live_subnormals("start")
    started = time.perf_counter()
    counts: list[Count] | str = []
    with Progress() as progress:
        before_the_end(progress.stop)
        progress.phase("importing the kernels")
        source, how = Source(), effort(examples, seed, quick, usual=HOUSE_EXAMPLES, spread=True)
        opened = source.open()
        everything = chosen == Selection() and outputs.shared
        call = (
            beside(traffic_of, chosen) if everything else nullcontext(partial(traffic_of, chosen))
        )
        of_kernels = beside_optimizers(chosen, opened.optimizers)
        proving = proofs.beside(None, opened.kernels, of_kernels, proofs.HOUSE)
        with call as traffic, proving as proved:
            ledger = judge(source, opened, chosen, how, outputs, progress)
            progress.phase("proving")
            ledger.proofs = proved()
            if ledger.with_status(Status.PASSED):
                progress.phase("counting the bytes of each step")
                counts = traffic()
    lacking = not_judged(declared_floor(), ledger) if chosen == Selection() else []
    return conclude(ledger, time.perf_counter() - started, opened, outputs, counts, lacking)


def judge_file(
    file: str,
    chosen: Selection,
    examples: int | None,
    seed: int | None,
    quick: bool,
    outputs: Outputs,
) -> int:
    """`parity check FILE`; the exit code."""
    require_live_subnormals("start")
    started = time.perf_counter()
    with Progress() as progress:
        before_the_end(progress.stop)
        progress.phase(f"loading {file}")
        source = Source(file=file)
        opened = source.open()
        for remark in opened.remarks:
            progress.note(f"remark: {remark} [{file}]")
        how = effort(examples, seed, quick)
        of_kernels = beside_optimizers(chosen, opened.optimizers)
        with proofs.beside(file, opened.kernels, of_kernels, proofs.FILE) as proved:
            ledger = judge(source, opened, chosen, how, outputs, progress)
            progress.phase("proving")
            ledger.proofs = proved()
    return conclude(ledger, time.perf_counter() - started, opened, outputs)


def judge(
    source: Source,
    opened: Opened,
    chosen: Selection,
    how: Effort,
    outputs: Outputs,
    progress: Progress,
) -> Ledger:
    """Judge kernels and whole optimizers, and show how far it is."""
    claimed = [task for task in planned(chosen, opened.kernels, opened.optimizers) if task.claimed]
    record = OnRecord(progress, JudgedCells(claimed), source, outputs)
    before_the_end(record.interrupted)
    return run(
        source,
        chosen,
        how,
        opened=opened,
        jobs=outputs.jobs,
        progress=record.begin,
        finished=record.add,
    )


class OnRecord:
    """Cells that are judged so far: shown while the run goes on, and printed if it is cut short."""

    def __init__(
        self, progress: Progress, count: JudgedCells, source: Source, outputs: Outputs
    ) -> None:
        self._progress, self._outputs = progress, outputs
        self._file = source.file
        self._cells: dict[Key, Cell] = {}
        self._told: set[str] = set()
        self._began = time.perf_counter()
        self._count = count
        progress.follow(count.text)

    def begin(self, key: Key, done: int, of: int) -> None:
        """Take note of the cell in work."""
        self._count.now = f"{key.kernel} {key.dtype}"

    def add(self, cell: Cell) -> None:
        """Take note of a finished cell; print a user's first verdict, and what broke."""
        self._cells[cell.key] = cell
        self._count.add(cell)
        self._count.now = f"{cell.key.kernel} {cell.key.dtype}"
        key, seconds = cell.key, time.perf_counter() - self._began
        judged = cell.status in (Status.PASSED, Status.FAILED)
        if self._file is not None and judged and not self._told:
            self._told.add("")
            what = f"{key.kernel} {key.dtype} {key.law}: {cell.status.value}"
            self._progress.note(f"first verdict after {seconds:.0f} s: {what}")
        if cell.status is Status.FAILED and key.kernel not in self._told:
            self._told.add(key.kernel)
            self._progress.note(f"broken: {cell.failure.splitlines()[0]}")

    def interrupted(self) -> str:
        """Print the table of what is on record; how much that is."""
        self._progress.stop()
        if self._cells:
            ledger = Ledger(cells=dict(self._cells), declared=self._count.expected)
            print_table(self._outputs.screen, ledger, self._outputs.verbose)
        return f"{self._count.done} of {self._count.total} cells were judged"


def conclude(
    ledger: Ledger,
    seconds: float,
    opened: Opened,
    outputs: Outputs,
    counts: list[Count] | str = "",
    lacking: Sequence[str] = (),
) -> int:
    """Print table, failures and verdict, in this order, and write the reports; the exit code."""
    screen = outputs.screen
    print_table(screen, ledger, outputs.verbose)
    if counts:
        print_traffic(screen, counts)
    interpreted = tuple({cell.key.kernel for cell in ledger.on("interpret")})
    for remark in opened.remarks_on_interpreter(interpreted):
        print_hanging(screen, "", remark.split())
    for name, text in printed(ledger).items():
        screen.print(f"{name} printed:\n{text}", highlight=False, markup=False, soft_wrap=True)
    print_diagnoses(screen, ledger)
    for line in lacking:
        print_hanging(screen, "", line.split())
    if outputs.json is not None:
        write(outputs.json, as_json(ledger, seconds), "--json")
    if outputs.junitxml is not None:
        write(outputs.junitxml, as_junit(ledger), "--junitxml")
    code = ledger.exit_code()
    if lacking and code == EXIT_KEPT:
        print_hanging(screen, "", f"{len(lacking)} declared cells were not judged".split(), "bold")
        return EXIT_TOO_LITTLE
    screen.print(last_line(ledger, seconds), style="bold", highlight=False, soft_wrap=True)
    return code


def printed(ledger: Ledger) -> dict[str, str]:
    """Output of each kernel in the first cell that has any, equal lines as one."""
    found: dict[str, str] = {}
    for cell in ledger.cells.values():
        if cell.output and cell.key.kernel not in found:
            runs = [(line, len(list(run))) for line, run in groupby(cell.output.splitlines())]
            lines = [line if count == 1 else f"{line}  ({count} times)" for line, count in runs]
            found[cell.key.kernel] = "\n".join(lines)
    return found
