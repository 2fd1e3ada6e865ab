"""Judge one cell: draw cases, apply a law, shrink and report the first violation."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.coverage import Coverage
from twinstep.parity.expected.instruction_error import InstructionError
from twinstep.parity.laws import LAWS
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.finding import Finding
from twinstep.parity.laws.process_state import PROCESS_STATE
from twinstep.parity.operations.operation import Operation
from twinstep.parity.records.errors import CannotJudge, CannotRun, JudgeFault, ReferenceFault
from twinstep.parity.records.ledger import Cell, Key, Status
from twinstep.parity.registry.engines import Engine
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.call_cache import CallCache
from twinstep.parity.runner.calls.made import Caller
from twinstep.parity.runner.causes.evidence import Cause, Evidence
from twinstep.parity.runner.causes.marks import KEPT_IN_FP32, WRAPS
from twinstep.parity.runner.error_search import ErrorSearch
from twinstep.parity.runner.failure import Failure
from twinstep.parity.runner.recipes import TURNS, Effort, more_recipes, recipes_of, turn_of
from twinstep.parity.runner.rerun import rerun, right_alone
from twinstep.parity.runner.run_plan import PlanRunner
from twinstep.parity.runner.shared import generated
from twinstep.parity.runner.shrink import one_less, reference_keeps, shrunk
from twinstep.parity.runner.signature import Signature, signature_of

# Calls that a known cause must explain besides the one that is wrong.
CONFIRMING = 4
# Causes are tried one after the other: as many tensors show them as well as a thousand.
CROWD = 24
# Elements of a case of which a repro file has room for every byte.
ROOM = 1 << 17


class _Broken(BaseException):
    """Stops the search at the first violation."""

    def __init__(self, case: Case, finding: Finding) -> None:
        super().__init__(finding.says)
        self.case = case
        self.finding = finding


def judge_cell(
    kernel: Kernel,
    dtype: str,
    law: Law,
    engine: Engine,
    effort: Effort,
    cache: CallCache | None = None,
    caller: Caller | None = None,
) -> Cell:
    """Judge a kernel on one dtype combination by one law.

    Args:
        kernel: under judgement.
        dtype: combination.
        law: that it must keep.
        engine: where it runs.
        effort: how hard to look.
        cache: calls that other laws of the same kernel, combination and engine have made.
        caller: makes the calls; by default in this process.
    """
    key = Key(
        operation=kernel.operation.name,
        kernel=kernel.name,
        dtype=dtype,
        law=law.name,
        engine=engine.name,
    )
    if law.claim and law.claim not in kernel.claims:
        reason = f"{kernel.name} does not claim {law.claim}"
        return Cell(key=key, status=Status.NOT_CLAIMED, reason=reason)
    idle = law.idle(kernel.operation, dtype)
    if idle:
        return Cell(key=key, status=Status.SKIPPED, reason=idle)
    if engine.missing:
        return Cell(key=key, status=Status.SKIPPED, reason=engine.missing)
    if engine.name not in law.engines:
        where = " or ".join(law.engines)
        return Cell(key=key, status=Status.SKIPPED, reason=f"{law.name} is judged on {where} only")
    started = time.perf_counter()
    cache = cache or CallCache()
    runner = PlanRunner(kernel, engine, effort.call_seconds, cache=cache, caller=caller)
    coverage = Coverage(kernel.operation)
    try:
        broken = _search(runner, dtype, law, effort, coverage)
    except (CannotRun, ReferenceFault) as cause:
        return Cell(key=key, status=Status.CANNOT_JUDGE, calls=runner.calls, reason=str(cause))
    except CannotJudge as cause:
        return Cell(key=key, status=Status.SKIPPED, calls=runner.calls, reason=str(cause))
    except Exception as error:
        return Cell(key=key, status=Status.CANNOT_JUDGE, calls=runner.calls, reason=fault(error))
    failure = None if broken is None else _explained(runner, law, broken, effort)
    cell = Cell(
        key=key,
        status=Status.PASSED if failure is None else Status.FAILED,
        calls=runner.calls,
        elements=runner.elements,
        seconds=time.perf_counter() - started,
        worst=dict(runner.worst),
        note=runner.note,
        shared=runner.repeated,
        sees=coverage.numbers() | ({"refused calls": runner.refused} if runner.refused else {}),
    )
    if _idle(runner):
        cell = _not_launched(cell, law)
    return cell if failure is None else replace(cell, **failure.record())


def _idle(runner: PlanRunner) -> bool:
    """True if nothing but the CPU has worked so far in the calls of a row meant for replay."""
    cache, returned = runner.cache, runner.calls or runner.cache.caught
    return bool(runner.engine.name == "replay" and returned and not cache.launches)


def _not_launched(cell: Cell, law: Law) -> Cell:
    """A cell of which no launch completed, nor one of its row before: the CPU did the work."""
    if cell.status is Status.PASSED and "cpu" not in law.engines:
        reason = f"{law.name} is judged on {' or '.join(law.engines)} only; no launch completed"
        return Cell(key=cell.key, status=Status.SKIPPED, calls=cell.calls, reason=reason, ran="cpu")
    return replace(cell, ran="cpu")


def fault(error: Exception) -> str:
    """A defect of the judge as a reason; the innermost place is where to look."""
    if isinstance(error, JudgeFault):
        lines = str(error).strip().splitlines()
        frames = [row.strip() for row in lines if row.startswith("  File ")]
        cause, place = lines[-1], frames[-1] if frames else ""
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        cause, place = f"{type(error).__name__}: {error}", f"{last.filename}:{last.lineno}"
    return f"the judge itself failed, not the kernel: {cause} [{place}]"


def _search(
    runner: PlanRunner, dtype: str, law: Law, effort: Effort, coverage: Coverage
) -> _Broken | None:
    """Go through the law's cases until one breaks it."""
    kernel = runner.kernel
    search = ErrorSearch(effort.seed or 0)
    try:
        for recipe in recipes_of(kernel, dtype, law, effort):
            varied = list(law.vary(runner.cache.case(kernel.operation, dtype, recipe)))
            if effort.spread and law.each_layout and len(varied) > 3:
                varied = varied[turn_of(kernel, dtype) :: TURNS]
            for case in varied:
                coverage.add(case)
                finding = runner.violation(law.plan(case, kernel.arithmetic))
                if finding is not None:
                    raise _Broken(case, finding)
                if law.name == "value":
                    search.see(case, runner.scores)
        for recipe in more_recipes(kernel, dtype, law, effort, runner.engine):
            case = generated(kernel.operation, dtype, recipe)
            coverage.add(case)
            finding = runner.violation(law.plan(case, kernel.arithmetic))
            if finding is not None:
                raise _Broken(case, finding)
        if law is PROCESS_STATE and runner.cache.changed:
            # The calls of every law are looked at; what they changed has been put back.
            case, says = runner.cache.changed[0]
            found = Finding(says=f"the kernel {says}", call=0, kind="process state")
            raise _Broken(case, found)
        if law.name == "value":
            _search_on(runner, law, search, effort.cases(law, kernel) // 2)
    except _Broken as broken:
        return broken
    return None


def _search_on(runner: PlanRunner, law: Law, search: ErrorSearch, generations: int) -> None:
    """Go on from the cases that came closest to a bound; nothing to do where there is none."""
    for _ in range(generations):
        case = search.next()
        if case is None:
            return
        finding = runner.violation(law.plan(case, runner.kernel.arithmetic))
        if finding is not None:
            raise _Broken(case, finding)
        search.see(case, runner.scores)


def _explained(runner: PlanRunner, law: Law, broken: _Broken, effort: Effort) -> Failure:
    """The failure: shrunk and shown again, unless one of the same row explains it."""
    failure = Failure(
        kernel=runner.kernel,
        engine=runner.engine.name,
        ran="cpu" * _idle(runner),
        law=law.name,
        case=broken.case,
        original=broken.case,
        finding=broken.finding,
        differ=broken.finding.differing(),
    )
    try:
        return _smaller(runner, law, broken, effort, failure) if effort.shrink_seconds else failure
    except Exception as error:
        # Nothing on the way to a better report may make less than a failure of it.
        return replace(failure, again=f"not shown again: {type(error).__name__}: {error}")


def _smaller(
    runner: PlanRunner, law: Law, broken: _Broken, effort: Effort, failure: Failure
) -> Failure:
    """The failure with its cause, the smallest case that shows it, and a file that was run."""
    arithmetic, history = runner.kernel.arithmetic, list(runner.cache.made)
    found = broken.finding

    def more() -> list[Evidence]:
        return _more_calls(runner, broken.case.combination, effort)

    evidence = (
        _evidence(runner, found.case, found.written, found.index)
        if found.case and found.written
        else None
    )
    likely = [one.cause for one in runner.cache.explained if one.cause is not None]
    signature = signature_of(law.name, found, evidence, more, likely)
    later = _only_later(signature, failure, likely, runner.instruction_error)
    signature = replace(signature, cause=None) if later else signature
    known = [one for one in runner.cache.explained if one.explains(signature)]
    cause = signature.cause
    failure = replace(failure, wrong=tuple(sorted(signature.wrong)), cause=later or _said(cause))
    if known:
        return replace(failure, like=known[0].law, cause=failure.cause or _said(known[0].cause))
    runner.cache.explained.append(signature)

    def finding_in(case: Case) -> Finding | None:
        finding = runner.violation(law.plan(case, arithmetic))
        if finding is None or cause is None or finding.case is None:
            return finding
        given = cause.gives(_evidence(runner, finding.case, finding.written, finding.index))
        return finding if given else None

    def fair(case: Case) -> bool:
        return reference_keeps(law.plan(case, arithmetic))

    case, finding = broken.case, found
    if not found.fatal:
        case, finding = shrunk(case, found, finding_in, effort.shrink_seconds, fair)
    whole, failure = failure, replace(failure, case=case, finding=finding)
    # What an instruction may do elsewhere leaves nothing that a repro could compare.
    if effort.repros is None or finding.sort in ("instruction", "host read", "process state"):
        return failure
    plan, first = law.plan(case, arithmetic), law.plan(broken.case, arithmetic)
    if any(call.end for call in plan.calls):
        kinds = {WRAPS: "from 2^31 elements on", KEPT_IN_FP32: "from 2^24 elements on"}
        sizes = kinds.get(failure.cause, "on a tensor of more than 2^31 elements")
        return replace(failure, again=f"fails {sizes}, too many for a repro file")
    if not all(call.portable for call in plan.calls):
        return failure
    if case.numel > ROOM:
        fewer = one_less(case)
        least = fewer is not None and finding_in(fewer) is None
        again = f"fails {'from' if least else 'on'} {case.numel} elements{' on' * least}"
        return replace(failure, again=f"{again}, too many for a repro file")
    found_first, smallest = (whole, first), (failure, plan)
    return rerun(smallest, found_first, history, effort.repros, runner.instruction_error)


def _only_later(
    signature: Signature, failure: Failure, likely: Sequence[Cause], error: InstructionError
) -> str:
    """The cause where the known mistake is none of the call's own: alone in a process it is right.

    Args:
        signature: of the failure.
        failure: as it was found.
        likely: causes of other failures of the row, which have been looked at.
        error: what the kernel's instructions add to its bounds.
    """
    cause, case = signature.cause, failure.called
    if cause is None or signature.evidence is None or cause in likely or failure.finding.ends:
        return ""
    if case.numel > ROOM or not right_alone(failure, case, error):
        return ""
    return "depends on earlier calls: the same call alone, in a new process, is right"


def _more_calls(runner: PlanRunner, dtype: str, effort: Effort) -> list[Evidence]:
    """What calls on the first cases of the covering leave behind."""
    law = LAWS["value"]
    recipes = recipes_of(runner.kernel, dtype, law, effort)
    for recipe in recipes[:CONFIRMING] if runner.kernel.operation.lists else recipes:
        case = runner.cache.case(runner.kernel.operation, dtype, recipe)
        runner.violation(law.plan(case, runner.kernel.arithmetic))
    return [_evidence(runner, o.memory.case, o.results()) for o in runner.cache.outcomes()]


def _independent(operation: Operation) -> bool:
    """True if lists alone are written, and each tensor whatever the others are."""
    lists = {row.name for row in operation.lists if not row.single and row.shape is None}
    every = len(lists) == len(operation.lists) and set(operation.writes) <= lists
    return every and "permutation" in operation.laws


def _said(cause: Cause | None) -> str:
    return "" if cause is None else cause.says


def _evidence(
    runner: PlanRunner, case: Case, written: Mapping[tuple[str, int], Tensor], wrong: int = 0
) -> Evidence:
    """A call and its results; of a crowd the tensor that is wrong, and some before it."""
    if case.length > CROWD and _independent(case.operation):
        kept = range(max(0, wrong + 1 - CROWD), max(CROWD, wrong + 1))
        written = {(name, kept.index(at)): x for (name, at), x in written.items() if at in kept}
        case = case.taken(kept)
    return Evidence(case, written, runner.kernel.arithmetic, runner.instruction_error)
