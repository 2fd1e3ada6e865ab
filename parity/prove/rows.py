"""Proofs of many kernels in processes of their own, row by row: one kernel on one dtype.

A kernel that ends its process, or never returns, costs its own row; the others go on.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

import twinstep.fast.kernels
from twinstep.parity.prove.prove import Prover
from twinstep.parity.prove.situations import Situation, situations
from twinstep.parity.prove.trace import Tracer
from twinstep.parity.records.proof import ENDED, OUT_OF_TIME, UNSUPPORTED, Proof, Verdict
from twinstep.parity.registry.engines import engine_for, running
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.calls.limits import SECOND
from twinstep.parity.runner.calls.pace import Pace
from twinstep.parity.runner.calls.places import place_of
from twinstep.parity.runner.calls.processes import kill_descendants
from twinstep.parity.runner.fork_server import fresh_processes
from twinstep.parity.runner.load_file import load_file

OURS = Path(twinstep.fast.kernels.__file__).resolve().parent
"""Our kernels: what runs there on the CPU is C++."""

RowName = tuple[str, str]
"""A kernel and a dtype combination."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what is tried, in seconds of CPU.

    Attributes:
        situation: of one situation.
        row: after which no further situation of a row is begun.
        total: of a process and of those before it that ended early, after which no further row is
            begun.
        hang: of a row with all that it starts, after which its process is ended.
        waits: in which a row and all that it starts wait, after which its process is ended.
        briefly: one situation for each row, at the smallest sizes and the first options.
    """

    situation: float = 60.0
    row: float = float("inf")
    total: float = float("inf")
    hang: float = 3600.0
    waits: float = 120.0
    briefly: bool = False


FILE = Limits(situation=10.0, row=10.0, total=120.0, hang=60.0, waits=40.0)
"""Of `parity check`: seconds for each kernel and dtype."""
HOUSE = Limits(situation=10.0, row=10.0, total=30.0, hang=120.0, briefly=True)
"""Of `parity run`: the situation of each row that costs least, beside the laws."""


def rows_of(known: Sequence[Kernel], chosen: Selection) -> list[RowName]:
    """The rows that are selected."""
    return [
        (kernel.name, dtype)
        for kernel in chosen.kernels(known)
        for dtype in kernel.dtypes
        if not chosen.dtypes or dtype in chosen.dtypes
    ]


def prove_situation(situation: Situation, seconds: float, *, briefly: bool = False) -> Verdict:
    """The verdict on one situation; briefly with the first of its settings of counters."""
    kernel = situation.kernel
    engine = engine_for(kernel)
    if engine.name == "cuda":
        # The code that is proved is PTX, which a GPU does not show.
        engine = engine_for(kernel, "replay")
    if engine.name not in ("replay", "cpu") or engine.missing:
        return Verdict(UNSUPPORTED, engine.missing or f"the engine {engine.name}")
    if engine.name == "cpu" and kernel.file.resolve().is_relative_to(OURS):
        return Verdict(UNSUPPORTED, "C++ for the CPU, whose machine code nothing here follows")
    with running(engine) if engine.name == "replay" else nullcontext():
        tracer = Tracer(kernel.function, engine)
        cases = [situation.case()] if briefly else list(situation.cases())
        try:
            return Prover(tracer, cases, seconds, kernel.arithmetic).prove()
        except SystemExit as error:
            return Verdict(ENDED, f"the call ends its process: {error!r}{place_of(error)}")


def prove_row(
    kernel: Kernel,
    dtype: str,
    limits: Limits,
    known: dict[object, Verdict] | None = None,
    among: Sequence[str] = (),
) -> list[Proof]:
    """Proofs of one kernel on one dtype combination, the smallest sizes first.

    Args:
        kernel: that is proved.
        dtype: combination.
        limits: of time.
        known: verdicts on other rows of the same function; this row's are added.
        among: combinations of its function, which share the choices of options.
    """
    known = {} if known is None else known
    began, found = time.process_time(), []
    # Those of a list in small tensors show every path, and cost least.
    every = situations(kernel, [dtype], among)
    chosen = sorted(every, key=lambda s: (s.aligned, s.layout != "list"))
    for situation in chosen[:1] if limits.briefly else chosen:
        left = limits.row - (time.process_time() - began)
        if left <= 0:
            words = f"the {limits.row:.0f} s of this row were over; parity prove has no such limit"
            verdict = Verdict(OUT_OF_TIME, words)
        elif (key := _subject(situation)) in known:
            verdict = replace(known[key], seconds=0.0)
        else:
            seconds = min(limits.situation, left)
            verdict = prove_situation(situation, seconds, briefly=limits.briefly)
            known[key] = verdict
        found.append(as_proof(situation, verdict))
    return found


def _subject(situation: Situation) -> object:
    """What the verdict on a situation depends on, besides time."""
    kernel, options = situation.kernel, tuple(situation.options.items())
    place = situation.layout, situation.sizes, situation.aligned
    return id(kernel.function), kernel.engines, kernel.arithmetic, situation.dtype, place, options


def as_proof(situation: Situation, verdict: Verdict) -> Proof:
    """The record of one situation."""
    return Proof(
        kernel=situation.kernel.name,
        operation=situation.kernel.operation.name,
        dtype=situation.dtype,
        place=situation.place,
        words=situation.words,
        facts={
            "layout": situation.layout,
            "sizes": list(situation.sizes),
            "aligned": situation.aligned,
            "options": dict(situation.options),
        },
        verdict=verdict,
    )


# --- processes -----------------------------------------------------------------------------

_worker: list[tuple[dict[str, Kernel], Limits]] = []


def _start(file: str | None, limits: Limits) -> None:
    """Prepare a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if file is None:
        register_house()
        known = list(kernels())
    else:
        # The judge's own import of the file has printed all this.
        with contextlib.redirect_stdout(io.StringIO()):
            known = load_file(file).kernels
    _worker[:] = [({kernel.name: kernel for kernel in known}, limits)]


def _rows(names: Sequence[RowName]) -> list[list[Proof]]:
    verdicts: dict[object, Verdict] = {}
    return [_row(name, verdicts) for name in names]


def _row(name: RowName, verdicts: dict[object, Verdict]) -> list[Proof]:
    known, limits = _worker[0]
    kernel, dtype = known[name[0]], name[1]
    alike = [other for other in known.values() if other.function is kernel.function]
    among = tuple(dict.fromkeys(d for other in alike for d in other.dtypes))
    if time.process_time() > limits.total:
        words = "the time of all proofs was over; parity prove has no such limit"
        verdict = Verdict(OUT_OF_TIME, words)
        return [_unsituated(kernel.name, kernel.operation.name, dtype, verdict)]
    with contextlib.redirect_stdout(io.StringIO()):
        return prove_row(kernel, dtype, limits, verdicts, among)


def _unsituated(kernel: str, operation: str, dtype: str, verdict: Verdict) -> Proof:
    return Proof(kernel=kernel, operation=operation, dtype=dtype, verdict=verdict)


def proved_rows(
    file: str | None, known: Sequence[Kernel], chosen: Selection, limits: Limits, jobs: int
) -> Iterator[list[Proof]]:
    """Proofs of every selected row, in order.

    Args:
        file: a user's file; None means ours.
        known: its kernels, or ours; only their names and claims are looked at.
        chosen: among them.
        limits: of time.
        jobs: number of processes.
    """
    operations = {kernel.name: kernel.operation.name for kernel in known}
    functions = {kernel.name: id(kernel.function) for kernel in known}
    left = rows_of(known, chosen)
    if limits.briefly:
        # Every kernel on one dtype combination, before any on its next; what is refused at once is
        # first, and steps around a sum, each of which costs as much as many others, are last.
        places = {
            (k.name, dtype): (_cost(k), turn) for k in known for turn, dtype in enumerate(k.dtypes)
        }
        left.sort(key=lambda row: places[row])
    alone = False
    while left:
        # Neighbours of one function and dtype (`triton.*`, `fast.*`) share their situations.
        groups = groupby(left, lambda name: (functions[name[0]], name[1]))
        tasks = [[name] for name in left] if alone else [list(own) for _, own in groups]
        count = max(1, min(jobs, len(tasks)))
        with ProcessPoolExecutor(
            count, mp_context=fresh_processes(), initializer=_start, initargs=(file, limits)
        ) as pool:
            futures = [pool.submit(_rows, names) for names in tasks]
            watch = _Watch(pool, limits)
            try:
                for future in futures:
                    for own in watch.result(future):
                        yield own
                        left.pop(0)
                    tasks.pop(0)
            except BrokenProcessPool:
                if count == 1 and len(tasks[0]) == 1:
                    name, dtype = left.pop(0)
                    verdict = Verdict(ENDED, "the call ends its process")
                    if watch.said:
                        verdict = Verdict(OUT_OF_TIME, f"no end after {watch.said}")
                    yield [_unsituated(name, operations[name], dtype, verdict)]
        # Processes that are ended, one for each dtype, would each have the whole time.
        limits = replace(limits, total=limits.total - watch.charged)
        # With several it is not known whose row it was.
        jobs, alone = 1, True


class _Watch:
    """Ends a process of a pool whose row takes too much: work or waiting, whatever the clock says.

    Attributes:
        said: what it took; empty as long as none has.
        charged: seconds of work and of waiting of all processes.
    """

    def __init__(self, pool: ProcessPoolExecutor, limits: Limits) -> None:
        self.said, self.charged = "", 0.0
        self._pool, self._limits = pool, limits
        self._paces: dict[int, Pace] = {}

    def result(self, future: Future[list[list[Proof]]]) -> list[list[Proof]]:
        """The result of the next rows."""
        self._paces = {}
        while not wait([future], SECOND).done:
            for process in list(self._pool._processes or ()):
                pace = self._paces.setdefault(process, Pace(process))
                before = pace.ran + pace.waited
                pace.look()
                self.charged += pace.ran + pace.waited - before
            # One that has no row left waits too.
            all_wait = all(p.waited >= self._limits.waits for p in self._paces.values())
            for process, pace in self._paces.items():
                waits = self._limits.waits if all_wait else float("inf")
                said = pace.too_much(self._limits.hang, waits)
                if said:
                    self.said = said
                    kill_descendants(process)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
        return future.result()


def _cost(kernel: Kernel) -> int:
    operation = kernel.operation
    sums = operation.takes_norms or "norm" in operation.writes
    return 0 if kernel.engines == ("cpu",) else 2 if sums and len(operation.lists) > 3 else 1


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@contextmanager
def beside(
    file: str | None, known: Sequence[Kernel], chosen: Selection, limits: Limits
) -> Iterator[Callable[[], list[Proof]]]:
    """Prove rows in a process beside what runs inside; a function that waits for the proofs.

    A choice of laws or of an engine without names leaves them out.
    """
    if not known or chosen.laws or chosen.engine not in (None, "replay", "cpu"):
        yield list
        return
    rows = proved_rows(file, known, chosen, limits, 1)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: [proof for row in rows for proof in row])
        yield future.result
