"""Carry out a plan: make the calls, run the checks, report the first violation."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.formula import formulated, lifted, refusal
from twinstep.parity.expected.instruction_error import (
    CPU,
    IEEE,
    UNKNOWN,
    InstructionError,
    instruction_error_of,
)
from twinstep.parity.expected.outputs import AcceptedOutputs, accepted_outputs
from twinstep.parity.laws.finding import Finding
from twinstep.parity.laws.plan import Call, Outcome, Plan, Values
from twinstep.parity.records.errors import ReferenceFault
from twinstep.parity.registry.engines import Engine
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.execute_call import execute_call
from twinstep.parity.runner.host_sync import watched
from twinstep.parity.runner.invoke import SECONDS

if TYPE_CHECKING:
    from twinstep.replay.launch.record import Launch

# What a kernel may raise to refuse a call: nothing from inside replay, Triton or a device.
REFUSAL = re.compile(r"raises (ValueError|TypeError|RuntimeError): (?!\(no message\))")
NOT_WATCHED: contextlib.nullcontext[tuple[str, ...]] = contextlib.nullcontext(())
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
        repeated: how many calls were taken from there.
        refused: how many calls ended in a clear error, where that is allowed.
        worst: largest error over bound seen in what was accepted, by written argument.
        instruction_error: what the instructions of the last judged call add to its bounds.
        scores: error over bound of every element of the last plan, by argument and position; of
            few bits, plus how near the result is to a tie (see `Accepted.nearness`).
    """

    kernel: Kernel
    engine: Engine
    seconds: float = SECONDS
    calls: int = 0
    elements: int = 0
    cache: CallCache = field(default_factory=CallCache)
    repeated: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.instruction_error = UNKNOWN
        self.scores: Scores = {}

    def violation(self, plan: Plan) -> Finding | None:
        """Carry out a plan; the first violation, or None."""
        outcomes: list[Outcome] = []
        approximate: list[Finding] = []
        for number, call in enumerate(plan.calls):
            with self._listening(plan, number, approximate):
                outcome, failure = self._outcome(plan, number, outcomes)
            if failure:
                return Finding(says=f"the kernel {failure}", call=number, failure=failure)
            self.calls += 1
            self.elements += call.case.numel
            outcomes.append(outcome)
        for check in plan.checks:
            found = check.violation(outcomes)
            if found is not None:
                remark = next((one.remark for one in outcomes if one.remark), "")
                return replace(found, says=found.says + remark)
        if approximate:
            return approximate[0]
        self._keep_worst(plan, outcomes)
        return None

    @contextlib.contextmanager
    def _listening(self, plan: Plan, number: int, found: list[Finding]) -> Iterator[None]:
        """Find approximate instructions of a kernel that claims to be exact.

        Replay rounds them correctly and the hardware need not, so equal values prove nothing.
        """
        claims = self.engine.name == "replay" and self.kernel.arithmetic == "exact"
        if not (claims and _needs_reference(plan, number)):
            yield
            return
        from twinstep.replay import launches

        with launches() as log:
            yield
        for launch in log:
            for name, place in launch.approximated_at.items():
                says = f"claims to be exact, but {launch.kernel} runs {name} at {place}"
                found.append(Finding(says=says, call=number))

    def _outcome(self, plan: Plan, number: int, outcomes: list[Outcome]) -> tuple[Outcome, str]:
        call = plan.calls[number]
        known = self.cache.outcome(call)
        if known is not None:
            self.repeated += 1
            return self._with_accepted(call, *known, plan, number), ""
        if call.reuse is None:
            memory = GuardedMemory.of(call.case, self.engine.device)
        else:
            memory = outcomes[call.reuse].memory.renewed(call.case)
        with (
            recorded_launches(self.engine) as log,
            watched(memory.block) if call.watched else NOT_WATCHED as reads,
            lifted(memory, call.lifted) as lift,
        ):
            failure = execute_call(call, self.kernel.function, memory, self.engine, self.seconds)
        if call.lifted:
            refusal(failure)
        after = memory.before if failure and not call.may_refuse else memory.after()
        refused = call.may_refuse and REFUSAL.match(failure) and torch.equal(after, memory.before)
        if not (call.end and call.reuse is not None):
            # The other end of a large call was launched by the first.
            self.instruction_error = instruction_error_on(self.engine, log)
        asked = not failure and _needs_reference(plan, number)
        accepted = self._accepted(call.case) if asked else _shapes(memory)
        outcome = Outcome(
            memory,
            memory.before,
            after,
            accepted,
            asked,
            tuple(reads),
            failure if refused else "",
            remark=tuning_remark(log),
        )
        if call.lifted:
            outcome = replace(outcome, formulas=formulated(lift, memory))
        if not failure:
            self.cache.keep(call, outcome, self.instruction_error)
        self.refused += bool(refused)
        return outcome, "" if refused else failure

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
            return accepted_outputs(case, self.kernel.arithmetic, self.instruction_error)
        except Exception as error:
            name = f"{case.operation.name}[{case.combination}]"
            raise ReferenceFault(
                f"{name} cannot be judged: its reference raises {type(error).__name__}: {error}"
            ) from error

    def _keep_worst(self, plan: Plan, outcomes: list[Outcome]) -> None:
        self.scores = {}
        for check in plan.checks:
            if not isinstance(check, Values):
                continue
            for span, accepted in outcomes[check.call].written():
                got = outcomes[check.call].got(span)
                ratio = accepted.ratio(got)
                if ratio is not None and ratio.numel():
                    known = self.worst.get(span.name, 0.0)
                    self.worst[span.name] = max(known, float(ratio.max().item()))
                    self.scores[span.name, span.index] = ratio.reshape(-1) + accepted.nearness(got)


@contextlib.contextmanager
def recorded_launches(engine: Engine) -> Iterator[list[Launch]]:
    """The launches made inside the context, where the engine records them."""
    if engine.name != "replay":
        yield []
        return
    from twinstep.replay import launches

    with launches() as log:
        yield log


def tuning_remark(log: list[Launch]) -> str:
    """Remark on launches that an autotuner made on the arguments of the call; empty without any."""
    tuned = Counter(launch.kernel for launch in log if launch.tuning)
    counts = ", ".join(f"{name} {count} times" for name, count in tuned.items())
    return f"; the tuner ran {counts} on these arguments: give restore_value" if tuned else ""


def instruction_error_on(engine: Engine, log: list[Launch]) -> InstructionError:
    """Instruction error that the bounds of a call must allow for on this engine."""
    if engine.name == "replay":
        return instruction_error_of(log) if log else CPU
    return {"cpu": CPU, "interpret": IEEE}.get(engine.name, UNKNOWN)


def _needs_reference(plan: Plan, number: int) -> bool:
    return any(isinstance(check, Values) and check.call == number for check in plan.checks)


def _shapes(memory: GuardedMemory) -> AcceptedOutputs:
    """Placeholders for checks that compare calls with one another and need no reference."""
    found: dict[str, list[Accepted]] = {}
    for span in memory.spans:
        found.setdefault(span.name, []).append(Accepted(value=span.value))
    return found
