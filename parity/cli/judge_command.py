"""The commands' work: run a session with progress, print the table, write the reports."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twinstep.parity.operations.table import operations
from twinstep.parity.records.errors import EXIT_KEPT, EXIT_TOO_LITTLE
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.engines import require, require_live_subnormals
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.declared_cells import declared_floor, not_judged
from twinstep.parity.report.diagnosis import print_diagnoses
from twinstep.parity.report.exports import as_json, as_junit, write
from twinstep.parity.report.table import print_table
from twinstep.parity.report.traffic import print_traffic, traffic_of
from twinstep.parity.runner.fork_server import beside
from twinstep.parity.runner.interpreter import remarks
from twinstep.parity.runner.judge_cell import EXAMPLES, Effort
from twinstep.parity.runner.load_file import load_file
from twinstep.parity.runner.scheduler import Source, Task, run
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.registry import Twin, twins
from twinstep.parity.sequences.session import (
    chosen_twins,
    effort_of,
    house_sequences,
    judge_twins,
    names_of,
    with_twins,
)

# Ours claim up to seven dtype combinations with the same source; two of them see 12 recipes in all.
HOUSE_EXAMPLES = 6
# Columns where there is no terminal: the table of our own kernels with every law.
PIPED = 160


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files that get results besides the screen, and the number of processes that make them."""

    json: str | None = None
    junitxml: str | None = None
    jobs: int | None = None

    @property
    def shared(self) -> bool:
        """True if processes beside the workers are allowed: no count is given, no GPU is here."""
        return self.jobs is None and not torch.cuda.is_available()

    @property
    def screen(self) -> Console:
        """The console for people: standard error where JSON takes standard output."""
        return Console(stderr=self.json == "-", width=None if sys.stdout.isatty() else PIPED)


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
    register_house()
    register_our_optimizers()
    how = effort(examples, seed, quick, usual=HOUSE_EXAMPLES, spread=True)
    everything = chosen == Selection() and outputs.shared
    asked = beside(traffic_of, chosen) if everything else nullcontext(partial(traffic_of, chosen))
    with asked as traffic:
        ledger = judge(Source(), kernels(), chosen, how, outputs, optimizers=twins())
        counts = traffic() if ledger.with_status(Status.PASSED) else []
    lacking = not_judged(declared_floor(), ledger) if chosen == Selection() else []
    for line in lacking:
        outputs.screen.print(line, highlight=False)
    if lacking and ledger.exit_code() == EXIT_KEPT:
        return EXIT_TOO_LITTLE
    print_traffic(outputs.screen, counts)
    return ledger.exit_code()


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
    found = load_file(file)
    for remark in found.remarks:
        outputs.screen.print(f"remark: {remark} [{file}]", highlight=False, markup=False)
    how = effort(examples, seed, quick)
    ledger = judge(Source(file=file), found.kernels, chosen, how, outputs, optimizers=found.twins)
    return ledger.exit_code()


def judge(
    source: Source,
    known: Sequence[Kernel],
    chosen: Selection,
    how: Effort,
    outputs: Outputs,
    *,
    optimizers: Sequence[Twin] = (),
) -> Ledger:
    """Run a session, print its table, write its reports."""
    screen = outputs.screen
    started = time.perf_counter()
    chosen = replace(chosen, also=names_of(optimizers))
    # Whole optimizers take longest: the tests drive ours through more.
    share = how.examples // 3 if how.spread else how.examples
    effort = effort_of(max(1, share), how.seed, how.repros)
    if source.file is None and chosen_twins(chosen, optimizers) and outputs.shared:
        with beside(house_sequences, chosen, effort) as sequences:
            ledger = _with_progress(source, known, chosen, how, outputs)
            ledger = with_twins(ledger, sequences())
    else:
        ledger = _with_progress(source, known, chosen, how, outputs)
        ledger = with_twins(ledger, judge_twins(chosen, optimizers, effort))
    seconds = time.perf_counter() - started
    print_diagnoses(screen, ledger)
    print_table(screen, ledger)
    interpreted = {cell.kernel for cell in ledger.cells if cell.engine == "interpret"}
    for remark in remarks([kernel for kernel in known if kernel.name in interpreted]):
        screen.print(remark, highlight=False, markup=False, soft_wrap=True)
    screen.print(f"{ledger.verdict()} in {seconds:.1f} s", style="bold", highlight=False)
    if outputs.json is not None:
        write(outputs.json, as_json(ledger, seconds), "--json")
    if outputs.junitxml is not None:
        write(outputs.junitxml, as_junit(ledger), "--junitxml")
    return ledger


def _with_progress(
    source: Source, known: Sequence[Kernel], chosen: Selection, how: Effort, outputs: Outputs
) -> Ledger:
    screen, started = outputs.screen, time.perf_counter()
    told: list[Cell] = []

    def tell(cell: Cell) -> None:
        """The first verdict on a user's kernel at once; on a terminal whatever is broken too."""
        judged = cell.status in (Status.PASSED, Status.FAILED)
        if source.file is not None and judged and not told:
            told.append(cell)
            key, seconds = cell.key, time.perf_counter() - started
            what = f"{key.kernel} {key.dtype} {key.law}: {cell.status.value}"
            screen.print(f"first verdict after {seconds:.0f} s: {what}", highlight=False)
        if cell.status is Status.FAILED and screen.is_terminal:
            screen.print(f"broken: {cell.failure.splitlines()[0]}", highlight=False)

    if not screen.is_terminal:
        return run(source, chosen, how, known=known, jobs=outputs.jobs, finished=tell)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        line = bar.add_task("", total=None)

        def show(task: Task, done: int, of: int) -> None:
            what = f"{task.kernel.name} {task.dtype} {task.law}"
            bar.update(line, description=what, completed=done, total=of)

        return run(
            source, chosen, how, known=known, jobs=outputs.jobs, progress=show, finished=tell
        )


def print_list() -> None:
    """`parity list`."""
    register_house()
    register_our_optimizers()
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)
    by_operation: dict[str, list[Kernel]] = {}
    for kernel in kernels():
        by_operation.setdefault(kernel.operation.name, []).append(kernel)
    for operation in operations():
        screen.print(f"{operation.name}: {operation.summary}", style="bold")
        screen.print(f"  dtypes   {', '.join(operation.combinations)}")
        screen.print(f"  laws     {', '.join(operation.laws)}")
        for kernel in by_operation.get(operation.name, []):
            claims = f"{kernel.arithmetic}, {', '.join(kernel.engines) or 'any engine'}"
            screen.print(f"  kernel   {kernel.name} ({claims})")
    for twin in twins():
        screen.print(f"{twin.reference.__name__}: a whole optimizer", style="bold")
        screen.print(f"  dtypes   {', '.join(twin.dtypes)}")
        screen.print(f"  actions  {', '.join(sorted(twin.rules.actions()))}")
        claims = f"{twin.arithmetic}, {', '.join(twin.engines) or 'any engine'}"
        screen.print(f"  class    {twin.name} ({claims})")
