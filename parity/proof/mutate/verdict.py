"""End of one subject: a wrong kernel, a planted fault, or a harmless variant."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Kind(Enum):
    """Origin of a subject."""

    WRONG = "wrong kernel"
    PLANTED = "planted fault"
    HARMLESS = "harmless variant"


class End(Enum):
    """Ends that a subject can have.

    KILLED: a wrong kernel by its own law, a planted fault by any. SURVIVED: not so. WAITS: a wrong
    kernel that the judge cannot see yet, with what it waits for. SAME_CODE: the compiler makes the
    original's instructions of it. STILLBORN: it does not compile. ACCEPTED, REJECTED: a harmless
    variant. ABSENT: it cannot run on this machine.
    """

    KILLED = "killed"
    SURVIVED = "survived"
    WAITS = "waits"
    SAME_CODE = "same code"
    STILLBORN = "does not compile"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    ABSENT = "cannot run here"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Names one subject."""

    kind: Kind
    name: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One subject and its end.

    Attributes:
        subject: that was judged.
        operation: whose contract it breaks or keeps.
        end: how it ended.
        says: what is wrong or what differs, in one sentence.
        cites: its threads and commits.
        law: that must kill it; empty where any may.
        killed_by: laws that were broken.
        kept: laws that were kept.
        complete: it was judged by every law that it has.
        reason: why it waits, is absent, survived or is no mutant; a false alarm's failure text.
        seconds: wall time.
    """

    subject: Subject
    operation: str
    end: End
    says: str
    cites: tuple[str, ...] = ()
    law: str = ""
    killed_by: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    complete: bool = False
    reason: str = ""
    seconds: float = 0.0

    def record(self) -> dict[str, object]:
        """The verdict as plain data."""
        row = asdict(self)
        row.pop("subject")
        return {
            "kind": self.subject.kind.value,
            "name": self.subject.name,
            **row,
            "end": self.end.value,
        }
