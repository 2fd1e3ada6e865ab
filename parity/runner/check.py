"""Judge one kernel or one optimizer from a program: `parity.check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.calls.subject import forked
from twinstep.parity.runner.diagnosis import diagnoses
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session
from twinstep.parity.sequences.registry import registered_as


@dataclass(frozen=True)
class Verdict:
    """Result of the judge.

    Attributes:
        ledger: every cell.
    """

    ledger: Ledger

    @property
    def passed(self) -> bool:
        """True if every law was kept and everything declared has run."""
        return self.ledger.exit_code() == 0

    def failures(self) -> list[Cell]:
        """The broken cells."""
        return self.ledger.with_status(Status.FAILED)

    def __bool__(self) -> bool:
        """The same as `passed`."""
        return self.passed

    def __str__(self) -> str:
        """The verdict in one sentence, notes, then a report for each defect."""
        texts = [diagnosis.text() for diagnosis in diagnoses(self.ledger)]
        notes = dict.fromkeys(
            f"note: {cell.key.kernel}: {cell.note} ({cell.key.law}: no failure)"
            for cell in self.ledger.cells.values()
            if cell.note
        )
        return "\n\n".join([self.ledger.verdict(), *notes, *texts])


def check(
    kernel: Kernel | Callable[..., object],
    *,
    examples: int = Effort.examples,
    seed: int | None = None,
    engine: str | None = None,
    laws: tuple[str, ...] = (),
    repros: str | None = None,
) -> Verdict:
    """Judge one kernel by every law of its operation, or one optimizer by sequences of actions.

    Args:
        kernel: a function that `register` decorated, or its registration, or a class that
            `register_optimizer` decorated.
        examples: cases drawn for the value law; other laws draw their share of it.
        seed: of the generator; None draws the same cases in every run.
        engine: where to run; None chooses.
        laws: names of laws; empty means all of the operation's.
        repros: folder for repro files; None writes none.

    Raises:
        UsageError: the function is not registered, or an option is unknown.
    """
    selection = Selection(engine=engine, laws=laws)
    twin = registered_as(kernel)
    rows = [row for row in kernels() if row is kernel or row.function is kernel]
    if not rows and isinstance(kernel, Kernel):
        rows = [kernel]
    if not rows and twin is None:
        name = getattr(kernel, "__name__", repr(kernel))
        raise UsageError(
            f"{name} is not registered; decorate it with register of twinstep.parity [check]"
        )
    effort = Effort(examples=examples, seed=seed, repros=repros)
    subject = forked({row.name: row.function for row in rows})
    session = Session(selection=selection, effort=effort, subject=subject)
    try:
        return Verdict(session.run(rows, [twin] if twin is not None else []))
    finally:
        if subject is not None:
            subject.close()
