"""Judge one subject: which laws it breaks, and what that makes of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import twinstep.replay
from twinstep.parity.laws import LAWS
from twinstep.parity.operations.operation import Combination
from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.corpus import Entry, Variant, corpus, harmless
from twinstep.parity.proof.corpus.harmless_optimizers import HARMLESS_OPTIMIZERS
from twinstep.parity.proof.corpus.judged import absent, judged
from twinstep.parity.proof.corpus.optimizers import Optimizer, judged_optimizer
from twinstep.parity.proof.corpus.wrong_classes import WRONG_CLASSES
from twinstep.parity.proof.mutate.copies import changed, kernel_of
from twinstep.parity.proof.mutate.same_code import Compiled, compiled, same_code
from twinstep.parity.proof.mutate.sites import Mutant, mutants, reaching
from twinstep.parity.proof.mutate.survivors import SURVIVORS
from twinstep.parity.proof.mutate.verdict import End, Kind, Subject, Verdict
from twinstep.parity.proof.upstream.bugs import cited
from twinstep.parity.records.ledger import Ledger, Status
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.recipes import EXAMPLES, Effort
from twinstep.parity.runner.session import Session
from twinstep.parity.sequences.judge import TwinEffort

# A rejection stops at its first case; enough of them make sure that it does not hang on the draw.
# A call may wait for the compiler, and a busy machine is no reason to call a kernel wrong.
ENOUGH = Effort(examples=48, shrink_seconds=0.0, repros=None, call_seconds=120.0)
# The law of whole optimizers.
SEQUENCES = "sequences"
# The laws that kill most faults first.
FIRST = ("value", "boundary_sizes", "nothing_else_written")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Effort of the search.

    Attributes:
        name: `quick` or `full`.
        examples: cases for each law that need not kill.
        every_law: judge wrong kernels by every law; otherwise by their own, but for those that show
            that their law is needed.
        every_dtype: judge on all dtype combinations; otherwise on the first, planted faults by the
            laws that kill most of them also on the last and on one with copies.
        laws: names; empty means all.
        first: stop at the first law that kills.
    """

    name: str = "full"
    examples: int = EXAMPLES
    every_law: bool = True
    every_dtype: bool = True
    laws: tuple[str, ...] = ()
    first: bool = False

    @property
    def effort(self) -> Effort:
        """For laws that need not kill, and for harmless variants."""
        return replace(ENOUGH, examples=self.examples)

    def laws_of(self, operation: str, first: str = "") -> list[str]:
        """The laws of an operation that are asked for: `first`, then the most telling ones."""
        rank = {name: place for place, name in enumerate(FIRST)} | {first: -1}
        chosen = [
            law
            for law in operation_named(operation, "mutate").laws
            if not self.laws or law in self.laws
        ]
        return sorted(chosen, key=lambda law: rank.get(law, len(rank)))


QUICK = Profile(name="quick", examples=4, every_law=False, every_dtype=False)
FULL = Profile()


@cache
def entries() -> dict[str, Entry]:
    """The wrong kernels by name."""
    return {entry.name: entry for entry in corpus()}


@cache
def variants() -> dict[str, Variant]:
    """The harmless variants by name."""
    return {variant.name: variant for variant in harmless()}


@cache
def classes(kind: Kind) -> dict[str, Optimizer]:
    """The wrong or the harmless optimizer classes by name."""
    rows = {Kind.WRONG: WRONG_CLASSES, Kind.HARMLESS: HARMLESS_OPTIMIZERS}
    return {row.name: row for row in rows.get(kind, ())}


def verdict_on(subject: Subject, profile: Profile) -> Verdict:
    """Judge one subject."""
    started = time.perf_counter()
    row = classes(subject.kind).get(subject.name)
    if row is not None:
        found = on_class(row, subject.kind, profile)
    elif subject.kind is Kind.WRONG:
        found = on_wrong(entries()[subject.name], profile)
    elif subject.kind is Kind.HARMLESS:
        found = on_harmless(variants()[subject.name], profile)
    else:
        found = on_mutant(mutants()[subject.name], profile)
    return replace(found, seconds=time.perf_counter() - started)


def on_class(row: Optimizer, kind: Kind, profile: Profile) -> Verdict:
    """Judge an optimizer class by sequences of actions; it has that law and no other."""
    harmless = kind is Kind.HARMLESS
    # A rejection stops at its first sequence: a wrong class gets as many as a default run has.
    number = TwinEffort.sequences if not harmless else 10 if profile.name == "quick" else 60
    failures = [judged_optimizer(row, dtype, number) for dtype in row.dtypes]
    broken = any(failures) if harmless else all(failures)
    ends = (End.REJECTED, End.ACCEPTED) if harmless else (End.KILLED, End.SURVIVED)
    return Verdict(
        subject=Subject(kind=kind, name=row.name),
        operation=row.reference,
        end=ends[0] if broken else ends[1],
        says=row.says,
        law=SEQUENCES,
        killed_by=(SEQUENCES,) if broken else (),
        kept=() if broken else (SEQUENCES,),
        complete=True,
        reason="\n".join(failures) if harmless else "",
    )


def on_wrong(entry: Entry, profile: Profile) -> Verdict:
    """Judge a wrong kernel: its own law must see it on every dtype combination that it names."""
    broken, kept, missed = [], [], []
    missing = absent(entry)
    complete = profile.every_law or entry.alone or bool(profile.laws)
    laws = profile.laws_of(entry.operation, entry.law)
    for law in () if missing else laws if complete else laws[:1]:
        own = law == entry.law
        dtypes = entry.dtypes if own or profile.every_dtype else entry.dtypes[:1]
        effort = ENOUGH if own else profile.effort
        ledger = judged(entry, laws=(law,), dtypes=dtypes, effort=effort)
        passed = [cell.key.dtype for cell in ledger.with_status(Status.PASSED)]
        if ledger.with_status(Status.FAILED):
            broken.append(law)
        elif passed:
            kept.append(law)
        missed += [f"`{law}` is kept on {dtype}" for dtype in passed if own]
        if profile.first and broken:
            break
    end = End.SURVIVED if missed or not broken else End.KILLED
    reason = "; ".join(missed)
    if missing:
        end, reason = End.ABSENT, missing
    if entry.waits_for and end is End.SURVIVED:
        end, reason = End.WAITS, f"waits for {entry.waits_for}"
    return Verdict(
        subject=Subject(kind=Kind.WRONG, name=entry.name),
        operation=entry.operation,
        end=end,
        says=entry.says,
        cites=cited(entry.bugs),
        law=entry.law,
        killed_by=tuple(broken),
        kept=tuple(kept),
        complete=complete and not profile.first,
        reason=reason,
    )


def on_harmless(variant: Variant, profile: Profile) -> Verdict:
    """Judge a variant that every law must accept."""
    end, reason, broken, kept = End.ABSENT, variant.unavailable, [], []
    if not variant.unavailable:
        laws = tuple(profile.laws_of(variant.operation))
        dtypes = variant.dtypes if profile.every_dtype else variant.dtypes[:1]
        ledger = judged(variant, laws=laws, dtypes=dtypes, effort=profile.effort)
        broken, kept = _laws(ledger, Status.FAILED), _laws(ledger, Status.PASSED)
        reason = "\n".join(cell.failure for cell in ledger.with_status(Status.FAILED))
        end = End.REJECTED if broken else End.ACCEPTED
    return Verdict(
        subject=Subject(kind=Kind.HARMLESS, name=variant.name),
        operation=variant.operation,
        end=end,
        says=variant.says,
        killed_by=tuple(broken),
        kept=tuple(kept),
        reason=reason,
    )


def _laws(ledger: Ledger, status: Status) -> list[str]:
    return list(dict.fromkeys(cell.key.law for cell in ledger.with_status(status)))


def on_mutant(mutant: Mutant, profile: Profile) -> Verdict:
    """Judge a fault planted in our own source, up to the first law that sees it."""
    with tempfile.TemporaryDirectory() as folder:
        with changed(mutant, Path(folder)):
            law, failure = _first_kill(mutant, profile)
            made = {} if law else compiled()
        end, reason = End.KILLED, ""
        if "the kernel does not compile: " in failure:
            end, reason, law = End.STILLBORN, failure.splitlines()[0], ""
        elif not law:
            end, reason = _survivor(mutant, made)
    return Verdict(
        subject=Subject(kind=Kind.PLANTED, name=mutant.name),
        operation=mutant.operations[0],
        end=end,
        says=f"{mutant.file}:{mutant.line}, {mutant.rule}: {mutant.before} -> {mutant.after}",
        killed_by=(law,) if law else (),
        reason=reason,
    )


def _first_kill(mutant: Mutant, profile: Profile) -> tuple[str, str]:
    """The first law that sees the fault, and its report."""
    # Those of few lists first: they take the least time.
    kernels = sorted(map(kernel_of, mutant.operations), key=lambda one: len(one.operation.lists))
    laws = dict.fromkeys(law for name in mutant.operations for law in profile.laws_of(name))
    for law in laws:
        for kernel in (one for one in kernels if law in one.operation.laws):
            combinations = kernel.operation.combinations
            few = some(combinations) if law in FIRST else tuple(combinations)[:1]
            for dtype in combinations if profile.every_dtype else few:
                chosen = Selection(dtypes=(dtype,), laws=(law,))
                ledger = Session(selection=chosen, effort=profile.effort).run([kernel])
                for cell in ledger.with_status(Status.FAILED):
                    return law, cell.failure
    return "", ""


def some(combinations: Mapping[str, Combination]) -> tuple[str, ...]:
    """The first dtype combination, the first with the most lists (copies too), and the last."""
    names = tuple(combinations)
    fullest = max(names, key=lambda name: len(combinations[name]))
    return tuple(dict.fromkeys((names[0], fullest, names[-1])))


def _survivor(mutant: Mutant, made: dict[tuple[str, str], list[Compiled]]) -> tuple[End, str]:
    """What a fault is that no law saw; the original modules are importable again."""
    reached = {place for place in made if place in reaching(mutant)}
    twinstep.replay.activate()
    try:
        number = same_code({place: made[place] for place in reached}) if mutant.jitted else 0
    finally:
        twinstep.replay.deactivate()
    if number:
        return End.SAME_CODE, f"equal instructions in all {number} variants that were compiled"
    return End.SURVIVED, SURVIVORS.get(mutant.name, "")


def known_laws() -> tuple[str, ...]:
    """All laws, in the order of the table."""
    return tuple(LAWS)
