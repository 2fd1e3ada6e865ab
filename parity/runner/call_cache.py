"""Calls that several laws of one row ask for are made once.

A row is one kernel with one dtype combination on one engine. Its laws take their cases from one
covering; what a call on one of these left behind serves every law that asks for that call.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.expected.instruction_error import InstructionError
from twinstep.parity.laws.call import Call, Outcome
from twinstep.parity.operations.operation import Operation
from twinstep.parity.runner.shared import generated
from twinstep.parity.runner.signature import Signature

REMEMBERED = 256


@dataclass
class CallCache:
    """The covering's cases of one row, and what calls on them left behind.

    Attributes:
        made: calls that the kernel was given, the last `REMEMBERED`, in order.
        explained: signatures of the failures that the row has shown so far.
        calls: how many the kernel was given.
        caught: in how many of them a launch raised and its caller went on, by what it raised.
        launches: how many launches ran to their end in them.
        changed: cases whose calls changed the state of their process, and a sentence on how.
    """

    made: deque[Call] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    explained: list[Signature] = field(default_factory=list)
    calls: int = 0
    caught: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    changed: list[tuple[Case, str]] = field(default_factory=list)
    _cases: dict[int, tuple[Recipe, Case]] = field(default_factory=dict)
    _outcomes: dict[int, tuple[Outcome, InstructionError]] = field(default_factory=dict)

    def case(self, operation: Operation, combination: str, recipe: Recipe) -> Case:
        """The case of a recipe; the same object for the same recipe."""
        key = hash((recipe.layout, recipe.sizes, recipe.regime, recipe.seed, recipe.one_step))
        known = self._cases.get(key)
        if known is None or known[0] != recipe:
            known = (recipe, generated(operation, combination, recipe))
            self._cases[key] = known
        return known[1]

    def outcome(self, call: Call) -> tuple[Outcome, InstructionError] | None:
        """Outcome of this call when it was made before, and the error of its instructions."""
        found = self._outcomes.get(id(call.case)) if call.plain else None
        if found is not None and found[0].memory.case is call.case:
            return found
        self.made.append(call)
        return None

    def keep(self, call: Call, outcome: Outcome, instruction_error: InstructionError) -> None:
        """Remember what a call on a case of the covering left behind."""
        if call.plain and any(case is call.case for _, case in self._cases.values()):
            self._outcomes[id(call.case)] = (outcome, instruction_error)

    def outcomes(self) -> list[Outcome]:
        """Outcomes of calls on cases of the covering."""
        return [outcome for outcome, _ in self._outcomes.values()]
