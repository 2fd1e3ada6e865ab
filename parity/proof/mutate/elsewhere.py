"""The rules of other projects over the same wrong kernels and harmless variants, next to ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinstep.parity.proof.corpus import Entry, Variant
from twinstep.parity.proof.corpus.judged import row_of
from twinstep.parity.proof.mutate.judging import QUICK, entries, variants, verdict_on
from twinstep.parity.proof.mutate.ordinary import KernelRaised, curves, pairs
from twinstep.parity.proof.mutate.rules_elsewhere import RULES, Elsewhere, Pair
from twinstep.parity.proof.mutate.verdict import End, Kind, Subject

# For this table it is enough that one law kills.
ONE_LAW = replace(QUICK, first=True)


@dataclass
class Row:
    """What a rule makes of the corpus.

    Attributes:
        says: the rule.
        source: where it comes from.
        killed: wrong kernels that it rejects.
        planted: wrong kernels that it can look at.
        alarms: harmless variants that it rejects.
        harmless: harmless variants that it can look at.
    """

    says: str
    source: str
    killed: int = 0
    planted: int = 0
    alarms: int = 0
    harmless: int = 0


def rows() -> Iterator[tuple[int, int, list[Row]]]:
    """The table after every subject, with the number done and the number of all."""
    wrong = [entry for entry in entries().values() if not entry.waits_for]
    right = [variant for variant in variants().values() if not variant.unavailable]
    subjects: list[Entry | Variant] = [*wrong, *right]
    table = [Row(rule.says, rule.source) for rule in RULES]
    ours = Row("every law", "parity")
    for done, subject in enumerate(subjects, start=1):
        is_wrong = isinstance(subject, Entry)
        seen = {curved: measured(subject, curved) for curved in (False, True)}
        for rule, row in zip(RULES, table, strict=True):
            content = judged_by(rule, seen[rule.curves])
            if content is not None:
                _count(row, is_wrong, content)
        kind = Kind.WRONG if is_wrong else Kind.HARMLESS
        end = verdict_on(Subject(kind=kind, name=subject.name), ONE_LAW).end
        _count(ours, is_wrong, end not in (End.KILLED, End.REJECTED))
        yield done, len(subjects), [*table, ours]


def measured(subject: Entry | Variant, curved: bool) -> list[Pair] | None:
    """What a kernel leaves, or its losses, on ordinary inputs; None if it raises."""
    measure = curves if curved else pairs
    with contextlib.suppress(KernelRaised):
        return measure(row_of(subject), subject.dtypes[0])
    return None


def judged_by(rule: Elsewhere, seen: list[Pair] | None) -> bool | None:
    """Whether a rule is content; None where it has nothing to look at.

    A kernel that raises on ordinary inputs is rejected by everyone.
    """
    if seen is None:
        return False
    return rule.content(seen) if seen else None


def _count(row: Row, is_wrong: bool, content: bool) -> None:
    if is_wrong:
        row.planted += 1
        row.killed += not content
    else:
        row.harmless += 1
        row.alarms += not content
