"""Expressions on one path: predicates that were decided there are constants."""

from __future__ import annotations

from collections.abc import Iterable

from twinstep.replay.names.table import Table


class Path:
    """Rewrites expressions under the outcomes of a path.

    Args:
        table: that holds them.
        decided: numbers of predicates with their outcomes.
    """

    def __init__(self, table: Table, decided: Iterable[tuple[int, bool]]) -> None:
        self.table = table
        self.facts: dict[int, bool] = {}
        for number, outcome in decided:
            self._learn(number, outcome)
        self._known: dict[int, int] = {}

    def _learn(self, number: int, outcome: bool) -> None:
        self.facts[number] = outcome
        row = self.table.rows[number]
        if row.op == "not":
            self._learn(row.args[0], not outcome)
        elif (row.op, outcome) in (("or", False), ("and", True)):
            for member in row.args:
                self._learn(member, outcome)

    def rewritten(self, number: int) -> int:
        """The number of an expression under the path."""
        if number < 0 or not self.facts:
            return number
        known, stack = self._known, [number]
        while stack:
            part = stack[-1]
            if part not in known:
                row = self.table.rows[part]
                whole = part in self.facts or row.op in ("leaf", "const")
                missing = [] if whole else [n for n in row.args if n not in known]
                if missing:
                    stack += missing
                    continue
                known[part] = self._row(part)
            stack.pop()
        return known[number]

    def _row(self, number: int) -> int:
        row = self.table.rows[number]
        if number in self.facts:
            return self.table.const(int(self.facts[number]), 0)
        if row.op in ("leaf", "const"):
            return number
        if row.granules == 0 and row.op == "or":
            # A disjunction holds where one over fewer members does.
            members = set(row.args)
            for fact, outcome in self.facts.items():
                own = self.table.rows[fact]
                if outcome and own.op == "or" and members.issuperset(own.args):
                    return self.table.const(1, 0)
        args = tuple(self._known[n] for n in row.args)
        return number if args == row.args else self.table.row(row.op, args, row.granules, row.site)
