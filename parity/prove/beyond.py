"""Comparison of expressions of different names, by equations that names do not know.

For a kernel that claims every bit, bitwuzla is asked for values that tell the two apart, or for
a proof that none do. For one that claims a bound, the two are compared over the real numbers, and
where they differ there, values are sought for which they are far apart. Questions of one shape, in
which leaves alone differ, are asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from twinstep.parity.cases.case import Case
from twinstep.parity.prove import reals, solver
from twinstep.parity.prove.doubles import far_apart
from twinstep.parity.prove.search import satisfying, thresholds
from twinstep.parity.prove.terms import FORMATS
from twinstep.parity.prove.trace import Leaf
from twinstep.replay.dtypes import Array
from twinstep.replay.names.evaluate import leaves_of, needed
from twinstep.replay.names.formula import first_difference, text
from twinstep.replay.names.table import Table

UNANSWERED = 3
"""Questions without an answer after which none is asked."""
PLACES = 64
"""Values that a control is drawn from along its range."""
OVER_THE_REALS = "equal over the real numbers, where nothing is rounded and nothing overflows"
Path = Sequence[tuple[int, bool]]


@dataclass(frozen=True)
class Opinion:
    """Result of a comparison.

    Attributes:
        equal: they are one: in all bits, or over the reals for a kernel that claims a bound.
        words: what the proof rests on, or why there is none.
        witnesses: bits of leaves with which they may differ, to be confirmed by a run.
    """

    equal: bool
    words: str = ""
    witnesses: tuple[Mapping[int, int], ...] = ()


@dataclass
class Beyond:
    """Compares expressions of different names.

    Attributes:
        table: that holds them.
        arithmetic: what the kernel claims, `exact` or `bounded`.
        seconds: limit of one question to the solver.
    """

    table: Table
    arithmetic: str
    seconds: float = solver.SECONDS
    known: dict[tuple[object, ...], Opinion] = field(default_factory=dict)
    about: dict[int, frozenset[int]] = field(default_factory=dict)
    unanswered: int = 0

    def opinion(
        self,
        pair: tuple[int, int],
        kind: str,
        path: Path,
        keep: Mapping[int, int],
        ranges: Callable[[], Mapping[int, Array]],
    ) -> Opinion:
        """Compare two expressions, once for each shape that they have.

        Args:
            pair: their numbers.
            kind: float format of the element; empty for integers.
            path: conditions that hold.
            keep: bits of leaves in the run.
            ranges: gives bits that controls are drawn from.
        """
        path = self._relevant(pair, path)
        numbers = [*pair, *(number for number, _ in path)]
        outcomes = tuple(outcome for _, outcome in path)
        key = (kind, outcomes, *solver.shape(self.table, numbers))
        if key not in self.known:
            found = self._opinion(pair, kind, path, keep, ranges)
            # A witness is of its own leaves: the first pair of a shape stands for all.
            self.known[key] = replace(found, witnesses=())
            return found
        return self.known[key]

    def _relevant(self, pair: tuple[int, int], path: Path) -> list[tuple[int, bool]]:
        """The conditions that share a leaf with expressions."""
        inside = leaves_of(self.table, pair)
        for number, _ in path:
            if number not in self.about:
                self.about[number] = frozenset(leaves_of(self.table, [number]))
        return [(n, o) for n, o in path if not self.about[n].isdisjoint(inside)]

    def _opinion(
        self,
        pair: tuple[int, int],
        kind: str,
        path: Path,
        keep: Mapping[int, int],
        ranges: Callable[[], Mapping[int, Array]],
    ) -> Opinion:
        real = reals.equal(self.table, *pair, kind, path) if kind in FORMATS else reals.Answer(None)
        if self.arithmetic != "exact":
            if real.equal:
                return Opinion(
                    True,
                    f"{OVER_THE_REALS} (an error is missed "
                    f"with a probability below 2^-{real.bits // 10 * 10})",
                )
            if real.equal is False:
                apart = [*far_apart(self.table, *pair, kind, path, keep, ranges())]
                found = satisfying(self.table, (*path, *real.side), dict(keep)) if real.side else {}
                return Opinion(
                    False, self._differ(real.side), (*([found] if found else []), *apart)
                )
        asked = self._asked(pair, kind, path)
        if asked.equal or asked.witnesses or not real.equal:
            return asked
        words = "over the real numbers the two are equal: another order of operations"
        return Opinion(False, f"{asked.words}\n{words}".strip())

    def _differ(self, side: Path) -> str:
        """Where two formulas differ."""
        tests = [f"{text(self.table, n, 3)} is {str(o).lower()}" for n, o in side]
        where = f", where {' and '.join(tests)}" if tests else ""
        return f"the two differ over the real numbers{where}"

    def _asked(self, pair: tuple[int, int], kind: str, path: Path) -> Opinion:
        """The solver's answer."""
        if not solver.installed():
            return Opinion(False, solver.MISSING)
        if self.unanswered >= UNANSWERED:
            return Opinion(False)
        a, b = first_difference(self.table, *pair)
        if (a, b) != pair:
            part = solver.ask(self.table, a, b, self._kind(a, b), (), self.seconds)
            if part.word == solver.EQUAL:
                return Opinion(True, self._proved(a, b))
        answer = solver.ask(self.table, *pair, kind, path, self.seconds)
        if answer.word == solver.EQUAL:
            return Opinion(True, self._proved(a, b))
        if answer.word == solver.DIFFERENT:
            return Opinion(False, "", (answer.bits,))
        self.unanswered += 1
        return Opinion(False, f"bitwuzla has no answer in {self.seconds:g} s")

    def _proved(self, a: int, b: int) -> str:
        left, right = (text(self.table, n, 3) for n in (a, b))
        return f"bitwuzla: {left} = {right}"

    def _kind(self, a: int, b: int) -> str:
        """The float format that both were computed in; empty where bits are compared."""
        rows = [self.table.rows[n] for n in (a, b)]
        kinds = {row.op.split(".")[-1] for row in rows if "." in row.op and row.granules}
        if len(kinds) != 1 or any(row.op.startswith("cvt.") or "." not in row.op for row in rows):
            return ""
        kind = kinds.pop()
        return kind if kind in FORMATS else ""


def control_values(
    case: Case, leaves: Mapping[Leaf, int], table: Table, numbers: Sequence[int]
) -> dict[int, Array]:
    """Bits of controls inside the ranges that are declared for them, constants of formulas too."""
    found = {}
    rng = np.random.default_rng(0)
    for control in case.operation.controls:
        number = leaves.get((control.name, 0, 0))
        drawn = control.range
        if number is None or drawn is None:
            continue
        size = 2 * table.rows[number].granules
        kind = np.dtype(f"f{size}")
        values = [*control.values, *(drawn.at(share) for share in rng.random(PLACES))]
        for bits in thresholds(table, needed(table, numbers), size // 2):
            value = float(np.array(bits, f"u{size}").view(kind))
            if control.bounded(value):
                values.append(value)
        found[number] = np.array(values, kind).view(f"u{size}")
    return found
