"""Sums over the verdicts: a score, what each law kills, and a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinstep.parity.proof.mutate.survivors import SURVIVORS
from twinstep.parity.proof.mutate.verdict import End, Kind, Verdict
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE


@dataclass(frozen=True)
class Score:
    """The outcome of a run.

    Attributes:
        verdicts: all of them.
        complete: nothing was left out by operation, law or kind, and no law was spared.
    """

    verdicts: Sequence[Verdict]
    complete: bool = True

    def of(self, kind: Kind, *ends: End) -> list[Verdict]:
        """Verdicts on one kind, those that ended so; without ends all."""
        return [v for v in self.verdicts if v.subject.kind is kind and (not ends or v.end in ends)]

    def planted(self, kind: Kind) -> list[Verdict]:
        """Subjects that had to be killed: none that waits, is no kernel, or is the original."""
        return self.of(kind, End.KILLED, End.SURVIVED)

    def judged(self) -> list[Verdict]:
        """Harmless variants that could run."""
        return self.of(Kind.HARMLESS, End.ACCEPTED, End.REJECTED)

    def laws(self) -> list[str]:
        """Laws that had something to say."""
        return list(dict.fromkeys(law for v in self.verdicts for law in (*v.killed_by, *v.kept)))

    def lone(self) -> dict[str, list[str]]:
        """For every law the wrong kernels that it kills and no other law does."""
        killed = [v for v in self.of(Kind.WRONG, End.KILLED) if v.complete]
        return {
            law: [v.subject.name for v in killed if v.killed_by == (law,)] for law in self.laws()
        }

    def problems(self) -> list[str]:
        """Reasons that close the gate, one sentence each."""
        found = [
            f"{v.subject.name} [{v.operation}] survives {v.law}: {v.says} {v.reason}"
            for v in self.of(Kind.WRONG, End.SURVIVED)
        ]
        found += [
            f"{v.subject.name} survives and is not in parity/proof/mutate/survivors.py"
            for v in self.of(Kind.PLANTED, End.SURVIVED)
            if not v.reason
        ]
        found += [
            f"{v.subject.name} is in parity/proof/mutate/survivors.py, but ended as: {v.end.value}"
            for v in self.of(Kind.PLANTED)
            if v.subject.name in SURVIVORS and v.end is not End.SURVIVED
        ]
        found += [
            f"{v.subject.name} waits for nothing any more: {', '.join(v.killed_by)} kills it"
            for v in self.of(Kind.WRONG, End.WAITS)
            if v.killed_by
        ]
        found += [
            f"false alarm: {v.subject.name} [{v.operation}] breaks {', '.join(v.killed_by)}"
            for v in self.of(Kind.HARMLESS, End.REJECTED)
        ]
        if self.complete:
            found += [f"no wrong kernel is killed by {law} alone" for law in self.lonely()]
        return found

    def lonely(self) -> list[str]:
        """Laws that might as well not be there: whatever they kill, another law kills too."""
        return [law for law, names in self.lone().items() if not names]

    def exit_code(self) -> int:
        """0 the gate is open; 1 it is not; 3 nothing was planted, or nothing harmless judged."""
        planted = self.planted(Kind.WRONG) + self.planted(Kind.PLANTED)
        if self.problems():
            return EXIT_BROKEN
        if not planted and not self.judged():
            return EXIT_TOO_LITTLE
        if self.complete and not (planted and self.judged()):
            return EXIT_TOO_LITTLE
        return EXIT_KEPT
