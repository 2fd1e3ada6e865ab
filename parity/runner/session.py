"""Judge a plan of cells one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.registry.engines import Engine, engine_for, running
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.calls.places import place_of
from twinstep.parity.runner.calls.remote import RemoteCaller, RemoteSides
from twinstep.parity.runner.calls.subject import Subject
from twinstep.parity.runner.judge_cell import fault, judge_cell
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.sequences.judge import LAW, TwinEffort, judge_twin, twin_engine, twin_key
from twinstep.parity.sequences.registry import DTYPES, Twin

# Sequences of actions for each case of the value law of our own classes, which take longest and
# which the tests drive through more; any other class gets as many as its rules say.
OWN_SEQUENCES = 2


@dataclass(frozen=True, kw_only=True)
class KernelTask:
    """One cell of a kernel to be run."""

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

    @property
    def claimed(self) -> bool:
        """True if the kernel claims the dtype combination."""
        return self.dtype in self.kernel.dtypes

    @property
    def work(self) -> int:
        """Measure of how long the row takes: what its operation must draw and compare."""
        operation = self.kernel.operation
        return len(operation.laws) * (len(operation.controls) + 4 * len(operation.lists))


@dataclass(frozen=True, kw_only=True)
class TwinTask:
    """The cell of an optimizer class on one dtype."""

    twin: Twin
    dtype: str
    engine: Engine

    @property
    def key(self) -> Key:
        """Names the cell."""
        return twin_key(self.twin, self.dtype, self.engine)

    @property
    def claimed(self) -> bool:
        """True if the class claims the dtype."""
        return self.dtype in self.twin.dtypes

    @property
    def work(self) -> int:
        """Measure of how long it takes: longer than any row of a kernel's."""
        return 1000


Task = KernelTask | TwinTask


def planned(
    selection: Selection, known: Sequence[Kernel] = (), optimizers: Sequence[Twin] = ()
) -> list[Task]:
    """Every declared cell of the selection: all dtypes, all laws; then all optimizers.

    Raises:
        UsageError: a name selects nothing.
    """
    found: list[Task] = []
    for kernel in beside_optimizers(selection, optimizers).kernels(known):
        engine = engine_for(kernel, selection.engine)
        for dtype in kernel.operation.combinations:
            found += [
                KernelTask(kernel=kernel, dtype=dtype, law=law, engine=engine)
                for law in kernel.operation.laws
                if _has(selection.laws, law) and _has(selection.dtypes, dtype)
            ]
    for twin in optimizers:
        names = (selection.operations, twin.reference.__name__), (selection.names, twin.name)
        if all(_has(*pair) for pair in (*names, (selection.laws, LAW))):
            engine = twin_engine(twin, selection.engine)
            dtypes = [dtype for dtype in DTYPES if _has(selection.dtypes, dtype)]
            found += [TwinTask(twin=twin, dtype=dtype, engine=engine) for dtype in dtypes]
    return found


def _has(asked: Sequence[str], name: str) -> bool:
    return not asked or name in asked


def beside_optimizers(selection: Selection, optimizers: Sequence[Twin]) -> Selection:
    """A selection of kernels in which names that select optimizers are no mistake."""
    names = Selection(
        operations=tuple(twin.reference.__name__ for twin in optimizers),
        names=tuple(twin.name for twin in optimizers),
        dtypes=tuple(DTYPES) if optimizers else (),
        laws=(LAW,) if optimizers else (),
    )
    return replace(selection, also=names)


Progress = Callable[[Key, int, int], None]


def silent(key: Key, done: int, of: int) -> None:
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
        subject: the process of a user's kernels; None calls them in this one.
    """

    selection: Selection = field(default_factory=Selection)
    effort: Effort = field(default_factory=Effort)
    progress: Progress = silent
    finished: Callable[[Cell], None] = forget
    subject: Subject | None = None

    def __post_init__(self) -> None:
        # Laws of one row share calls; the next row starts anew.
        self._row: tuple[str, str, str] | None = None
        self._cache = CallCache()
        self._given_up: dict[tuple[str, str], str] = {}

    def ledger(self, tasks: Sequence[Task]) -> Ledger:
        """An empty ledger that declares these cells."""
        declared = tuple(task.key for task in tasks)
        device, seed = self.selection.engine, self.effort.seed
        return Ledger(declared=declared, asked_device=device, seed=seed)

    def run(self, known: Sequence[Kernel], optimizers: Sequence[Twin] = ()) -> Ledger:
        """Judge what is selected among the known kernels and optimizers."""
        tasks = planned(self.selection, known, optimizers)
        ledger = self.ledger(tasks)
        for done, task in enumerate(tasks):
            self.progress(task.key, done, len(tasks))
            cell = self.cell(task)
            ledger.add(cell)
            self.finished(cell)
        return ledger

    def cell(self, task: Task) -> Cell:
        """Judge one cell; a defect of the judge's own is no verdict on the kernel."""
        key = task.key
        given_up = self._given_up.get((key.kernel, key.dtype), self._given_up.get((key.kernel, "")))
        if given_up and task.claimed:
            return Cell(key=key, status=Status.CANNOT_JUDGE, reason=given_up)
        try:
            cell = self._twin(task) if isinstance(task, TwinTask) else self._kernel(task)
        except SystemExit as error:
            says = f"SystemExit({error.code!r}){place_of(error)}"
            reason = f"what it is judged against ends the process that judges: {says}"
            cell = Cell(key=key, status=Status.CANNOT_JUDGE, reason=reason)
        except Exception as error:
            cell = Cell(key=key, status=Status.CANNOT_JUDGE, reason=fault(error))
        if cell.fatal:
            # A hang costs its whole time again on every dtype.
            hangs = cell.fatal == "hang"
            self._given_up[key.kernel, "" if hangs else key.dtype] = given_up_after(key, hangs)
        output = self.subject.printed() if self.subject is not None else ""
        return replace(cell, output=output)

    def _kernel(self, task: KernelTask) -> Cell:
        kernel, effort = task.kernel, self.effort
        if task.dtype not in kernel.dtypes:
            reason = f"{kernel.name} does not claim {task.dtype}"
            return Cell(key=task.key, status=Status.NOT_CLAIMED, reason=reason)
        row = (kernel.name, task.dtype, task.engine.name)
        if self._row != row:
            self._row, self._cache = row, CallCache()
        caller = None
        if self.subject is not None:
            caller = RemoteCaller(kernel, task.engine, self.subject, effort.call_seconds)
        with running(task.engine):
            cell = judge_cell(
                kernel, task.dtype, LAWS[task.law], task.engine, effort, self._cache, caller
            )
        return replace(cell, arithmetic=kernel.arithmetic, accepts=dict(kernel.accept))

    def _twin(self, task: TwinTask) -> Cell:
        own = self.subject is None and task.twin.subject.__module__.startswith("twinstep.")
        each = OWN_SEQUENCES if own else task.twin.rules.each
        examples = self.effort.examples // (3 if self.effort.spread else 1)
        effort = TwinEffort(
            sequences=max(1, each * examples),
            seed=self.effort.seed or 0,
            repros=self.effort.repros,
        )
        sides = None
        if self.subject is not None:
            sides = RemoteSides(self.subject, task.engine, self.effort.call_seconds)
        return judge_twin(task.twin, task.dtype, task.engine, effort, sides)


def given_up_after(key: Key, everywhere: bool = False) -> str:
    """Reason why the other cells of a row, or of a kernel, are not judged."""
    return f"not called again after `{key.law}`" + f" [{key.dtype}]" * everywhere
