"""`parity mutate`: how many wrong kernels the judge rejects, and how many right ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from twinstep.parity.cli.judge_command import Outputs
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.table import HOUSE
from twinstep.parity.proof.mutate.judging import FULL, QUICK, Profile, classes, entries, variants
from twinstep.parity.proof.mutate.pool import cores, verdicts
from twinstep.parity.proof.mutate.report import as_json, print_score
from twinstep.parity.proof.mutate.score import Score
from twinstep.parity.proof.mutate.sites import mutants
from twinstep.parity.proof.mutate.verdict import Kind, Subject, Verdict
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.engines import require_live_subnormals
from twinstep.parity.report.exports import write
from twinstep.parity.report.progress import progress

KINDS = {"wrong": Kind.WRONG, "harmless": Kind.HARMLESS, "planted": Kind.PLANTED}
QUICK_SAMPLE = 24


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Choice of what is judged.

    Attributes:
        operations: names; empty means all.
        laws: names; empty means all.
        kinds: `wrong`, `harmless`, `planted`; empty means all.
        sample: faults planted in our own source; None means all, or QUICK_SAMPLE if quick.
        seed: of the sample.
        quick: few cases.
        first: stop at the first law that kills.
    """

    operations: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    sample: int | None = None
    seed: int = 0
    quick: bool = False
    first: bool = False

    @property
    def profile(self) -> Profile:
        """Effort of the search."""
        return replace(QUICK if self.quick else FULL, laws=self.laws, first=self.first)

    @property
    def complete(self) -> bool:
        """True if the run shows for each law that it is needed."""
        return not (self.operations or self.laws or self.kinds or self.first)


def run_mutate(choice: Choice, outputs: Outputs) -> int:
    """The command; the exit code."""
    require_live_subnormals("start")
    _check(choice)
    jobs = outputs.jobs or cores()
    started = time.perf_counter()
    found = _judged(subjects(choice), choice.profile, jobs)
    seconds = time.perf_counter() - started
    score = Score(found, choice.complete)
    print_score(outputs.screen, score, seconds, choice.profile.name, jobs)
    if outputs.json is not None:
        write(outputs.json, as_json(score, seconds, choice.profile.name, jobs), "--json")
    return score.exit_code()


def _check(choice: Choice) -> None:
    known = {
        "--op": (choice.operations, [operation.name for operation in HOUSE]),
        "--law": (choice.laws, list(LAWS)),
        "--only": (choice.kinds, list(KINDS)),
    }
    for flag, (asked, names) in known.items():
        for value in asked:
            if value not in names:
                raise UsageError(
                    f'{flag} "{value}" is unknown, but should be among {", ".join(names)}'
                )


def subjects(choice: Choice) -> list[Subject]:
    """Everything that the choice stands for, in the order of judging."""
    kinds = [KINDS[name] for name in choice.kinds or KINDS]

    def meant(operations: Sequence[str]) -> bool:
        return not choice.operations or bool(set(operations) & set(choice.operations))

    names = {
        Kind.PLANTED: _sample(choice, [n for n, m in mutants().items() if meant(m.operations)]),
        Kind.WRONG: [name for name, e in entries().items() if meant([e.operation])],
        Kind.HARMLESS: [name for name, v in variants().items() if meant([v.operation])],
    }
    if not (choice.operations or choice.laws):
        for kind in (Kind.WRONG, Kind.HARMLESS):
            names[kind] += classes(kind)
    return [
        Subject(kind=kind, name=name) for kind in names if kind in kinds for name in names[kind]
    ]


def _sample(choice: Choice, names: list[str]) -> list[str]:
    """Some of the planted faults, in the order of files, so that what is compiled is used again.

    Each name has a lot of its own: a change of our source leaves the rest of the sample as it was.
    """
    wanted = QUICK_SAMPLE if choice.sample is None and choice.quick else choice.sample
    if wanted is None or wanted >= len(names):
        return names
    lots = {name: sha256(f"{choice.seed}/{name}".encode()).digest() for name in names}
    drawn = set(sorted(names, key=lambda name: lots[name])[:wanted])
    return [name for name in names if name in drawn]


def _judged(chosen: list[Subject], profile: Profile, jobs: int) -> list[Verdict]:
    found: list[Verdict] = []
    with progress(len(chosen)) as told:
        for verdict in verdicts(chosen, profile, jobs):
            found.append(verdict)
            told(verdict.subject.name[:60], 1)
    return found
