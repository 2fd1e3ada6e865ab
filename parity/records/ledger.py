"""Record of a run, cell by cell, so that an empty success cannot look like a full one.

A cell is operation x kernel x dtype x law x engine. Every cell that the registry declares has
to appear with a status; a run with fewer cells than declared, or with nothing judged, is no
success.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum

from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_NO_DEVICE, EXIT_TOO_LITTLE
from twinstep.parity.records.names import number
from twinstep.parity.records.proof import REFUTED, Proof, by_row, word_of

SCHEMA = "parity/1"


class Status(Enum):
    """Ends that a cell can have."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CLAIMED = "not claimed"
    SKIPPED = "skipped"
    EXPECTED_FAILURE = "expected failure"
    CANNOT_JUDGE = "cannot judge"


@dataclass(frozen=True, kw_only=True)
class Key:
    """Names one cell."""

    operation: str
    kernel: str
    dtype: str
    law: str
    engine: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell and how it ended.

    Attributes:
        key: names it.
        status: how it ended.
        reason: why it was skipped, is not claimed, is expected to fail, or cannot be judged.
        calls: calls of the kernel.
        elements: elements of the largest list, summed over the calls.
        sequences: of actions, where a whole optimizer was judged; `calls` are its actions.
        over_ranks: how many of these were over simulated ranks.
        seconds: wall time.
        worst: largest error over bound by written argument; empty for exact kernels.
        note: what is worth knowing and breaks no law; empty if there is nothing.
        arithmetic: what the kernel claims.
        accepts: deviations that its bounds allow for, and the reason of each.
        shared: how many of the calls other laws of the same row had made already.
        sees: what the cases show: regimes, size classes, values of controls and options, flags.
        failure: the failure text.
        fatal: kind of a failure after which the kernel was not called again; see `Made`.
        kind: of the violation.
        wrong: arguments whose values are wrong, or the exception and its place.
        cause: the known mistake that gives the values.
        like: the law whose failure on the same dtypes has the same cause.
        repro: path of the stand-alone file.
        output: what the kernel printed.
        ran: the engine it ran on, where no launch completed on that of its key; else empty.
    """

    key: Key
    status: Status
    reason: str = ""
    calls: int = 0
    elements: int = 0
    sequences: int = 0
    over_ranks: int = 0
    seconds: float = 0.0
    worst: dict[str, float] = field(default_factory=dict)
    note: str = ""
    arithmetic: str = ""
    accepts: dict[str, str] = field(default_factory=dict)
    shared: int = 0
    sees: dict[str, object] = field(default_factory=dict)
    failure: str = ""
    fatal: str = ""
    kind: str = ""
    wrong: tuple[str, ...] = ()
    cause: str = ""
    like: str = ""
    repro: str = ""
    output: str = ""
    ran: str = ""

    def __post_init__(self) -> None:
        if self.status not in (Status.PASSED, Status.FAILED) and not self.reason:
            raise ValueError(f"{self.key} is {self.status.value} without a reason [ledger]")
        if self.status is Status.PASSED and self.calls == 0:
            raise ValueError(f"{self.key} passed without a single call [ledger]")

    @property
    def engine(self) -> str:
        """The engine that its calls ran on."""
        return self.ran or self.key.engine

    def record(self) -> dict[str, object]:
        """The cell as plain data."""
        row = asdict(self)
        key = row.pop("key") | {"engine": self.engine}
        return {"schema": SCHEMA, **key, **row, "status": self.status.value}


@dataclass
class Ledger:
    """All cells of one run.

    Attributes:
        declared: cells that must appear.
        asked_device: the engine that was asked for, if one was.
        seed: of the cases, if one was given.
        proofs: of the kernels, beside the laws; none but a refutation counts against them.
    """

    declared: tuple[Key, ...] = ()
    asked_device: str | None = None
    cells: dict[Key, Cell] = field(default_factory=dict)
    seed: int | None = None
    proofs: list[Proof] = field(default_factory=list)

    def add(self, cell: Cell) -> None:
        """Record a cell.

        Raises:
            ValueError: it was recorded already.
        """
        if cell.key in self.cells:
            raise ValueError(f"{cell.key} is recorded twice [ledger]")
        self.cells[cell.key] = cell

    def sorted(self) -> Ledger:
        """The same ledger with its cells in the order in which they are declared."""
        ordered = {key: self.cells[key] for key in self.declared if key in self.cells}
        return Ledger(self.declared, self.asked_device, ordered, self.seed, self.proofs)

    def missing(self) -> list[Key]:
        """Declared cells that did not appear."""
        return [key for key in self.declared if key not in self.cells]

    def with_status(self, *statuses: Status) -> list[Cell]:
        """Cells that ended like this."""
        return [cell for cell in self.cells.values() if cell.status in statuses]

    def on(self, engine: str) -> list[Cell]:
        """Cells of an engine."""
        return [cell for key, cell in self.cells.items() if key.engine == engine]

    def counts(self) -> dict[str, int]:
        """Number of cells by status."""
        counted = Counter(cell.status.value for cell in self.cells.values())
        return {status.value: counted[status.value] for status in Status}

    def refuted(self) -> int:
        """Number of rows, a kernel on a dtype combination each, that a proof has refuted."""
        return sum(word_of(row) == REFUTED for row in by_row(self.proofs).values())

    def exit_code(self) -> int:
        """0 all kept; 1 broken or refuted; 3 too little ran; 4 nothing ran for want of a device."""
        if self.with_status(Status.FAILED) or self.refuted():
            return EXIT_BROKEN
        if not self.with_status(Status.PASSED, Status.CANNOT_JUDGE):
            lacking = self.with_status(Status.SKIPPED)
            return EXIT_NO_DEVICE if lacking and self.asked_device else EXIT_TOO_LITTLE
        incomplete = self.missing() or self.with_status(Status.CANNOT_JUDGE)
        return EXIT_TOO_LITTLE if incomplete else EXIT_KEPT

    def verdict(self) -> str:
        """One sentence: what the exit code means, and the seed that gives the same cases again."""
        return self._ending() + (f" with --seed {self.seed}" if self.seed is not None else "")

    def _ending(self) -> str:
        failed, missing = len(self.with_status(Status.FAILED)), len(self.missing())
        if failed:
            return f"{failed} of {failed + len(self.with_status(Status.PASSED))} cells broke a law"
        if refuted := self.refuted():
            are = "row is" if refuted == 1 else "rows are"
            return f"no law was broken, but {refuted} {are} refuted by a proof"
        unable = len(self.with_status(Status.CANNOT_JUDGE))
        if unable:
            return f"{unable} of {len(self.declared)} declared cells cannot be judged"
        if not self.with_status(Status.PASSED):
            return "nothing was judged"
        if missing:
            return f"{missing} of {len(self.declared)} declared cells did not run"
        return f"all laws kept in {number(len(self.with_status(Status.PASSED)), 'cell')}"
