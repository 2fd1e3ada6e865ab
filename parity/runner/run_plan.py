"""Carry out a plan: make the calls, run the checks, report the first violation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory, Span
from twinstep.parity.expected.accepted import Accepted, joined
from twinstep.parity.expected.bounded import NotBounded
from twinstep.parity.expected.formula import Formulated, formulated, refusal
from twinstep.parity.expected.instruction_error import UNKNOWN, InstructionError
from twinstep.parity.expected.outputs import AcceptedOutputs
from twinstep.parity.expected.ulp import same
from twinstep.parity.laws.call import Call, Outcome
from twinstep.parity.laws.finding import Finding
from twinstep.parity.laws.plan import Plan, Values
from twinstep.parity.records.errors import ReferenceFault
from twinstep.parity.registry.engines import Engine
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.calls.invoke import SECONDS
from twinstep.parity.runner.calls.local import LocalCaller
from twinstep.parity.runner.calls.made import Caller, Made
from twinstep.parity.runner.shared import expected

# What a kernel may raise to refuse a call: nothing from inside replay, Triton or a device.
WAITS = re.compile(r"raises (Deadlock|NoProgress): ")
REFUSAL = re.compile(r"raises (ValueError|TypeError|RuntimeError): (?!\(no message\))")
Scores = dict[tuple[str, int], Tensor]


@dataclass
class PlanRunner:
    """Carries out the plans of one kernel on one engine.

    Attributes:
        kernel: under judgement.
        engine: where it runs.
        seconds: limit of one call.
        calls: calls made so far.
        elements: elements of the largest list, summed over all calls.
        cache: calls that other laws have made.
        caller: makes the calls; by default in this process.
        repeated: how many calls were taken from there.
        refused: how many calls ended in a clear error, where that is allowed.
        worst: largest error over bound seen in what was accepted, by written argument.
        instruction_error: what the instructions of the last judged call add to its bounds.
        note: what the first plan that had something to note says; empty if none had.
    """

    kernel: Kernel
    engine: Engine
    seconds: float = SECONDS
    calls: int = 0
    elements: int = 0
    cache: CallCache = field(default_factory=CallCache)
    caller: Caller | None = None
    repeated: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._caller = self.caller or LocalCaller(self.kernel.function, self.engine, self.seconds)
        self.worst: dict[str, float] = {}
        self.instruction_error = UNKNOWN
        self.note = ""
        self._graded: list[tuple[Span, Accepted, Tensor]] = []

    @property
    def scores(self) -> Scores:
        """Error over bound of every element of the last plan, by argument and position.

        Of few bits, plus how near the result is to a tie (see `Accepted.nearness`).
        """
        graded = [(span, one.ratio(got), one.nearness(got)) for span, one, got in self._graded]
        return {
            (span.name, span.index): ratio.reshape(-1) + nearness
            for span, ratio, nearness in graded
            if ratio is not None and ratio.numel()
        }

    def violation(self, plan: Plan) -> Finding | None:
        """Carry out a plan; the first violation, or None."""
        outcomes: list[Outcome] = []
        approximate: list[Finding] = []
        for number, call in enumerate(plan.calls):
            known = self.cache.outcome(call)
            if known is not None:
                self.repeated += 1
                outcome = self._with_accepted(call, *known, plan, number)
            else:
                found = self._made(plan, number, outcomes, approximate)
                if isinstance(found, Finding) and call.turned and not found.fatal:
                    self.note = self.note or found.says
                    break
                if isinstance(found, Finding):
                    return found
                outcome = found
            self.calls += 1
            self.elements += call.case.numel
            outcomes.append(outcome)
        for check in plan.checks:
            violation = check.violation(outcomes)
            if violation is not None:
                remark = next((one.remark for one in outcomes if one.remark), "")
                return replace(
                    violation, says=violation.says + remark, ends=tuple(_ends(plan, outcomes))
                )
        if approximate:
            return approximate[0]
        self._keep_worst(plan, outcomes)
        for check in plan.notes if len(outcomes) == len(plan.calls) else ():
            if noted := check.violation(outcomes):
                self.note = self.note or f"{noted.name} {noted.says}"
        return None

    def _made(
        self, plan: Plan, number: int, outcomes: list[Outcome], approximate: list[Finding]
    ) -> Outcome | Finding:
        """Make a call; what it left, or the finding that it did not return."""
        call = plan.calls[number]
        reuse = None if call.reuse is None else outcomes[call.reuse].memory
        made = self._caller.make(call, reuse)
        self.cache.calls += 1
        self.cache.launches += made.launches
        self.cache.changed += [(call.case, says) for says in made.changed]
        if call.lifted:
            refusal(made.failure)
        memory, failure = made.memory, made.failure
        after = memory.before if failure and not call.may_refuse else made.after
        may = bool(call.may_refuse and REFUSAL.match(failure))
        refused = may and torch.equal(after, memory.before)
        # A kernel may count on blocks that run together, and then no other order is one of a GPU's.
        refused = refused or (bool(call.schedule) and WAITS.match(failure) is not None)
        if failure and not refused:
            where = ", in autocast and with other switches turned" if call.turned else ""
            says = f"the kernel {failure}{where}"
            if made.caught:
                self.cache.caught[made.caught] += 1
                often = f"in {self.cache.caught[made.caught]} of {self.cache.calls} calls"
                cause = failure.partition(": ")[2]
                says = f"{made.caught} {often}, and the kernel went on: {cause}{where}"
            if may:
                says += f"; it may refuse here, but had written {_written(memory, after)} before"
            return Finding(says=says, call=number, failure=failure, fatal=made.fatal)
        if not (call.end and call.reuse is not None):
            # The other end of a large call was launched by the first.
            self.instruction_error = made.error
        asked = not failure and _needs_reference(plan, number)
        if asked and self.engine.name == "replay" and self.kernel.arithmetic == "exact":
            # Replay rounds these correctly and the hardware need not: equal values prove nothing.
            approximate += [
                Finding(says=f"claims to be exact, but {says}", call=number)
                for says in made.approximate
            ]
        outcome = Outcome(
            memory=memory,
            before=memory.before,
            after=after,
            accepted=self._accepted(call.case) if asked else _shapes(memory),
            evaluated=asked,
            reads=made.reads,
            refused=failure if refused else "",
            formulas=self._formulas(made) if call.lifted else (),
            changed=made.changed,
            keeps=made.keeps,
            remark=made.remark,
        )
        if not failure:
            self.cache.keep(call, outcome, self.instruction_error)
        self.refused += bool(refused)
        return outcome

    def _formulas(self, made: Made) -> tuple[Formulated, ...]:
        return formulated(made.wide, made.foreign, made.memory, self.kernel.arithmetic)

    def _with_accepted(
        self,
        call: Call,
        outcome: Outcome,
        instruction_error: InstructionError,
        plan: Plan,
        number: int,
    ) -> Outcome:
        """What a call made for another law left behind, with what this law wants to know of it."""
        if not _needs_reference(plan, number) or outcome.evaluated:
            return outcome
        self.instruction_error = instruction_error
        complete = replace(outcome, accepted=self._accepted(call.case), evaluated=True)
        self.cache.keep(call, complete, instruction_error)
        return complete

    def _accepted(self, case: Case) -> AcceptedOutputs:
        try:
            return expected(case, self.kernel.arithmetic, self.instruction_error)
        except NotBounded as error:
            raise ReferenceFault(
                f"{case.operation.name} cannot be judged as bounded: in its reference {error}; "
                'use arithmetic="exact"'
            ) from error
        except Exception as error:
            name = f"{case.operation.name}[{case.combination}]"
            raise ReferenceFault(
                f"{name} cannot be judged: its reference raises {type(error).__name__}: {error}"
            ) from error

    def _keep_worst(self, plan: Plan, outcomes: list[Outcome]) -> None:
        checks = [check for check in plan.checks if isinstance(check, Values)]
        self._graded = [
            (span, accepted, outcomes[check.call].got(span))
            for check in checks
            for span, accepted in outcomes[check.call].written()
        ]
        for name in dict.fromkeys(span.name for span, _, _ in self._graded):
            rows = [(accepted, got) for span, accepted, got in self._graded if span.name == name]
            for whole, got in joined(rows):
                ratio = whole.ratio(got)
                if ratio is not None and ratio.numel():
                    known = self.worst.get(name, 0.0)
                    self.worst[name] = max(known, float(ratio.max().item()))


def _ends(plan: Plan, outcomes: list[Outcome]) -> Iterator[str]:
    """Places of a tensor of more than 2³¹ elements that are wrong."""
    for check in plan.checks:
        if isinstance(check, Values) and plan.calls[check.call].end and check.violation(outcomes):
            yield plan.calls[check.call].end


def _needs_reference(plan: Plan, number: int) -> bool:
    return any(isinstance(check, Values) and check.call == number for check in plan.checks)


def _shapes(memory: GuardedMemory) -> AcceptedOutputs:
    """Placeholders for checks that compare calls with one another and need no reference."""
    found: dict[str, list[Accepted]] = {}
    for span in memory.spans:
        found.setdefault(span.name, []).append(Accepted(value=span.value))
    return found


def _written(memory: GuardedMemory, after: Tensor) -> str:
    """Arguments that no longer hold what the call found."""
    spans = [s for s in memory.spans if not same(s.of(after), s.of(memory.before)).all()]
    return ", ".join(dict.fromkeys(span.name for span in spans)) or "outside every tensor"
