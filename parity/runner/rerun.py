"""Run a repro file before it is promised, and find out what it takes to fail again.

A case may fail alone, always or by chance; only after other calls; or not again at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.instruction_error import InstructionError
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Values
from twinstep.parity.records.standalone import Execute, Run, fresh, run_file
from twinstep.parity.runner.failure import Failure
from twinstep.parity.runner.repro import CPU, write_repro
from twinstep.parity.runner.run_program import run_program

SEARCH = 60.0
ALONE = 8
MANY = 300
# Runs that a chance of the observed size breaks all but surely.
SURE = 7
LARGEST = 4 << 20
# Processes that must all end alike before a failure is said to be certain.
FRESH = 5
Shown = tuple[Failure, Plan]


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """Search for a file that fails again.

    Attributes:
        small: the failure as it was shrunk, and the plan of its case.
        whole: the failure as it was found, likewise.
        history: calls that the kernel was given before, in order.
        folder: for the file.
        instruction_error: what the kernel's instructions add to its bounds.
        deadline: no run begins after it.
    """

    small: Shown
    whole: Shown
    history: Sequence[Call]
    folder: str
    instruction_error: InstructionError
    deadline: float

    def shown(self) -> Failure:
        """The failure with a file that fails, or with the word that none does."""
        written, partly = self._written(self.small), None
        for shown in (self.small, self.whole):
            written = self._written(shown)
            run = self._run(written, ALONE)
            if run.refused:
                return self._without(written, f"not shown again: {run.refused}")
            if run.broken and run.broken == run.runs:
                return self._confirmed(written)
            if run.broken and self._always(written):
                again = "fails at the first call of a process alone"
                return self._confirmed(self._written(shown, again=again))
            if run.broken:
                partly = partly or (shown, run)
        found = self._after_others() or self._by_chance()
        if found is None and partly is not None:
            found = self._repeating(*partly)
        return self._without(written, self._denial()) if found is None else self._confirmed(found)

    def _confirmed(self, written: Failure) -> Failure:
        """The failure, if its file fails where nothing is imported yet."""
        if self._run(written, execute=fresh).broken:
            return written
        return self._without(written, self._denial())

    def _denial(self) -> str:
        if time.monotonic() > self.deadline:
            return f"does not fail again alone, as far as {SEARCH:g} s of trying can show"
        return (
            f"does not fail again alone, neither in {MANY} runs nor after the "
            f"{len(self.history)} calls before it"
        )

    def _written(
        self, shown: Shown, before: Sequence[Call] = (), times: int = 1, again: str = ""
    ) -> Failure:
        failure, plan = shown
        return write_repro(
            replace(failure, again=again),
            plan,
            self.folder,
            self.instruction_error,
            before=before,
            times=times,
        )

    def _without(self, written: Failure, again: str) -> Failure:
        Path(written.repro).unlink(missing_ok=True)
        return replace(self.small[0], again=again)

    def _run(self, written: Failure, count: int = 0, execute: Execute = run_program) -> Run:
        hangs = written.finding.sort == "hang"
        return run_file(written.repro, self.deadline - time.monotonic(), count, hangs, execute)

    def _breaks(self, written: Failure) -> bool:
        return self._run(written).broken > 0

    def _always(self, written: Failure) -> bool:
        return all(self._breaks(written) for _ in range(FRESH))

    def _by_chance(self) -> Failure | None:
        """A file that fails by chance, if many runs show that."""
        for shown in (self.small, self.whole):
            run = self._run(self._written(shown), MANY)
            if run.broken:
                return self._repeating(shown, run)
        return None

    def _repeating(self, shown: Shown, run: Run) -> Failure:
        times = -(-SURE * run.runs // run.broken)
        again = f"fails by chance, in about {run.broken} of {run.runs} runs"
        return self._written(shown, times=times, again=again)

    def _after_others(self) -> Failure | None:
        """A file that fails after the shortest tail of the calls before, thinned out."""
        tail = self._breaking(self.whole, self.history)
        if tail is None:
            return None
        size = 1
        while size < len(tail):
            shorter = self._breaking(self.whole, tail[-size:])
            if shorter is not None:
                tail = shorter
            size *= 2
        for call in list(tail) if len(tail) > 1 else []:
            others = [other for other in tail if other is not call]
            tail = self._breaking(self.whole, others) or tail
        small = self._breaking(self.small, tail) is not None
        shown = self.small if small else self.whole
        if any(self._breaks(self._written(shown)) for _ in range(FRESH)):
            return None
        count = f"{len(tail)} other call{'' if len(tail) == 1 else 's'}"
        again = f"fails only after {count}, which the file makes first"
        written = self._written(shown, tail, again=again)
        return written if self._always(written) else None

    def _breaking(self, shown: Shown, before: Sequence[Call]) -> Sequence[Call] | None:
        """These calls, if the plan fails after them; not asked past the deadline."""
        if time.monotonic() > self.deadline:
            return None
        return before if before and self._breaks(self._written(shown, before)) else None


def rerun(
    small: Shown,
    whole: Shown,
    history: Sequence[Call],
    folder: str,
    instruction_error: InstructionError,
) -> Failure:
    """The failure with a repro file that has been seen to fail; see `Rerun`."""
    return Rerun(
        small=small,
        whole=whole,
        history=_light(_earlier(history, whole[1])),
        folder=folder,
        instruction_error=instruction_error,
        deadline=time.monotonic() + SEARCH,
    ).shown()


def right_alone(failure: Failure, case: Case, instruction_error: InstructionError) -> bool:
    """True if a call has right values where it is the only one of a process.

    Args:
        failure: of the kernel.
        case: arguments of the call.
        instruction_error: what the kernel's instructions add to its bounds.
    """
    plan = Plan(calls=(Call(case=case),), checks=(Values(),))
    with TemporaryDirectory() as folder:
        written = write_repro(failure, plan, folder, instruction_error)
        run = run_file(written.repro, SEARCH)
    return run.runs > 0 and not run.broken


def _earlier(history: Sequence[Call], found: Plan) -> list[Call]:
    """The calls before those of the plan that failed, which the history ends with."""
    calls = list(history)
    for _ in found.calls:
        if calls and any(_alike(calls[-1], call) for call in found.calls):
            calls.pop()
    return calls


def _alike(one: Call, other: Call) -> bool:
    if one.case is other.case:
        return True
    return one.case.recipe == other.case.recipe and torch.equal(
        GuardedMemory.of(one.case, CPU).before, GuardedMemory.of(other.case, CPU).before
    )


def _light(calls: Sequence[Call]) -> list[Call]:
    """The last calls that a file has room for; large and captured ones are left out."""
    kept: list[Call] = []
    room = LARGEST
    for call in reversed(calls):
        room -= GuardedMemory.of(call.case, CPU).before.numel() if call.portable else 0
        if room < 0:
            break
        if call.portable:
            kept.append(replace(call, lifted=False, watched=False))
    return kept[::-1]
