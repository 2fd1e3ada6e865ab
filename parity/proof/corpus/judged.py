"""A wrong kernel or a harmless variant before the judge, without a trace left in the registry."""

from __future__ import annotations

from twinstep.parity.proof.corpus.entry import Entry, Variant
from twinstep.parity.records.ledger import Ledger
from twinstep.parity.registry.engines import engine_for
from twinstep.parity.registry.kernels import Kernel, register, registrations
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.recipes import Effort
from twinstep.parity.runner.session import Session

# Nothing is shrunk or written to disk: only the verdict counts here.
VERDICT_ONLY = Effort(shrink_seconds=0.0, repros=None)


def row_of(subject: Entry | Variant) -> Kernel:
    """The kernel as the registry would hold it; the registry forgets it at once.

    Raises:
        UsageError: the operation is unknown, or the signature is not the operation's.
    """
    with registrations() as collected:
        register(
            subject.operation,
            name=subject.name,
            arithmetic=subject.arithmetic,
            dtypes=subject.dtypes,
            engines=subject.engines,
            claims=subject.claims if isinstance(subject, Entry) else (),
            accept=subject.accept if isinstance(subject, Variant) else None,
        )(subject.kernel)
    return collected[0]


def absent(subject: Entry | Variant) -> str:
    """Reason why no engine that the kernel runs on is here; empty if one is."""
    return engine_for(row_of(subject)).missing


def judged(
    subject: Entry | Variant,
    *,
    laws: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = (),
    effort: Effort = VERDICT_ONLY,
) -> Ledger:
    """Judge by these laws on these dtype combinations; empty means all that it claims."""
    selection = Selection(laws=laws, dtypes=dtypes or subject.dtypes)
    return Session(selection=selection, effort=effort).run([row_of(subject)])
