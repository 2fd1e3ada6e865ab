"""Judge one cell: draw cases, apply a law, shrink and report the first violation."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from parity.case import Case, Recipe
from parity.compare import Failure
from parity.engines import Engine
from parity.errors import ReferenceFault
from parity.expand import expand
from parity.finding import Finding
from parity.invoke import SECONDS
from parity.judge import Judge
from parity.laws.base import Law
from parity.ledger import Cell, Key, Status
from parity.operation import Operation
from parity.registry import Kernel
from parity.repro import write_repro
from parity.shrink import shrunk
from parity.strategies import recipes

Value = TypeVar("Value")
EXAMPLES = 12
SCALAR_CASES = {"value": 20}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to look.

    Attributes:
        examples: cases drawn for the value law; others draw their share of it.
        seed: of the generator; None draws the same cases in every run.
        call_seconds: limit of one call.
        shrink_seconds: limit of shrinking one failure.
        repros: folder for repro files; None writes none.
    """

    examples: int = EXAMPLES
    seed: int | None = None
    call_seconds: float = SECONDS
    shrink_seconds: float = 4.0
    repros: str | None = "."

    def cases(self, law: Law, kernel: Kernel) -> int:
        """Number of recipes to draw for a law."""
        if not kernel.operation.lists:
            return max(1, round(self.examples * law.share * SCALAR_CASES.get(law.name, 8)))
        # A whole step has the decisions of several operations in it, and only the values show them.
        several = 2 if law.name == "value" and len(kernel.operation.options) > 2 else 1
        return max(1, round(self.examples * law.share * several))


class _Broken(BaseException):
    """Stops the search at the first violation; no `Exception`, or Hypothesis would run it again."""

    def __init__(self, case: Case, finding: Finding) -> None:
        super().__init__(finding.says)
        self.case = case
        self.finding = finding


def judge_cell(kernel: Kernel, dtype: str, law: Law, engine: Engine, effort: Effort) -> Cell:
    """Judge a kernel on one dtype combination by one law."""
    key = Key(
        operation=kernel.operation.name,
        kernel=kernel.name,
        dtype=dtype,
        law=law.name,
        engine=engine.name,
    )
    idle = law.idle(kernel.operation, dtype)
    if idle:
        return Cell(key=key, status=Status.SKIPPED, reason=idle)
    if engine.missing:
        return Cell(key=key, status=Status.SKIPPED, reason=engine.missing)
    started = time.perf_counter()
    judge = Judge(kernel, engine, effort.call_seconds)
    try:
        broken = _search(judge, dtype, law, effort)
        failure = None if broken is None else _explained(judge, law, broken, effort)
    except ReferenceFault as fault:
        return Cell(key=key, status=Status.FAILED, calls=judge.calls, failure=str(fault))
    return Cell(
        key=key,
        status=Status.PASSED if failure is None else Status.FAILED,
        calls=judge.calls,
        elements=judge.elements,
        seconds=time.perf_counter() - started,
        worst=dict(judge.worst),
        failure="" if failure is None else failure.text(),
        repro="" if failure is None else failure.repro,
    )


def _search(judge: Judge, dtype: str, law: Law, effort: Effort) -> _Broken | None:
    """Draw cases until one breaks the law."""
    kernel = judge.kernel

    regimes = itertools.cycle(law.draw.regimes)
    # Hypothesis leans towards first choices, and a dozen cases can miss what the others show.
    deck = Deck(effort.seed or 0)

    def examine(recipe: Recipe) -> None:
        turn = replace(_dealt(kernel.operation, recipe, deck), regime=next(regimes))
        drawn = expand(kernel.operation, dtype, turn)
        for case in law.vary(drawn):
            finding = judge.violation(law.plan(case, kernel.arithmetic))
            if finding is not None:
                raise _Broken(case, finding)

    try:
        for layout_group in _layout_groups(law, kernel):
            draws = recipes(kernel.operation, law.draw, layout_group)
            _drawn(given(draws)(examine), effort.cases(law, kernel), effort.seed)()
    except _Broken as broken:
        return broken
    return None


@dataclass
class Deck:
    """Deals the values of each name in shuffled rounds, so that a few cases see all of them."""

    seed: int

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.left: dict[str, list[int]] = {}

    def deal(self, name: str, values: Sequence[Value]) -> Value:
        """The next value of this name; the first round starts with the ordinary one."""
        places = range(len(values))
        if name not in self.left:
            self.left[name] = [*self.dice.sample(places[1:], len(values) - 1), 0]
        if not self.left[name]:
            self.left[name] = self.dice.sample(places, len(values))
        return values[self.left[name].pop()]


def _dealt(operation: Operation, recipe: Recipe, deck: Deck) -> Recipe:
    """The recipe with options, and controls where there is nothing else, from the deck."""
    options = {row.name: deck.deal(row.name, row.choices) for row in operation.options}
    if operation.lists:
        return replace(recipe, options=options)
    controls = {row.name: deck.deal(row.name, row.values) for row in operation.controls}
    return replace(recipe, options=options, controls=controls)


def _layout_groups(law: Law, kernel: Kernel) -> list[tuple[str, ...]]:
    """Laws that enumerate do so once for each layout; the others draw the layout."""
    if law.share < 0.2 and kernel.layouts:
        return [(layout,) for layout in kernel.layouts]
    return [kernel.layouts]


def _drawn(test: Callable[[], None], cases: int, seed: int | None) -> Callable[[], None]:
    """Hypothesis without a database, a deadline, and shrinking (`parity.shrink` knows the data)."""
    profile = settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=seed is None,
        phases=(Phase.generate,),
        # Expanding a recipe costs more than drawing it, and the engine decides how slow a call is.
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    return profile(test if seed is None else seeded(seed)(test))


def _explained(judge: Judge, law: Law, broken: _Broken, effort: Effort) -> Failure:
    """Shrink the case, find the violation again, and write the repro file."""
    kernel = judge.kernel

    def finding_in(case: Case) -> Finding | None:
        return judge.violation(law.plan(case, kernel.arithmetic))

    case, finding = shrunk(broken.case, broken.finding, finding_in, effort.shrink_seconds)
    failure = Failure(
        kernel=kernel,
        engine=judge.engine.name,
        law=law.name,
        case=case,
        original=broken.case,
        finding=finding,
    )
    # What an instruction may do elsewhere leaves nothing that a repro could compare.
    if effort.repros is None or not (finding.name or finding.failure or finding.got is not None):
        return failure
    plan = law.plan(case, kernel.arithmetic)
    return write_repro(failure, plan, effort.repros, judge.charges)
