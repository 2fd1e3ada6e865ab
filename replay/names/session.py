"""State of a run of kernels, and of torch, on names."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from twinstep.replay.errors import CannotReplay
from twinstep.replay.names.memory import NamedMemory
from twinstep.replay.names.normal import new_table
from twinstep.replay.names.sums import Sums
from twinstep.replay.names.table import Table


class NotNamed(CannotReplay):
    """A name reaches an instruction, or an operation of torch, that is not followed."""


@dataclass
class Session:
    """State of a run of kernels, and of torch, on names.

    Attributes:
        table: the expressions.
        memory: names of global memory.
        decided: number of each predicate that was decided by its value, the decision, and where.
        sums: in which names lose their order.
    """

    table: Table = field(default_factory=new_table)
    memory: NamedMemory = field(default_factory=NamedMemory)
    decided: dict[int, tuple[bool, str]] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)

    def decide(self, number: int, outcome: bool, site: str) -> None:
        """Note that the run goes on where a predicate has this outcome."""
        row = self.table.rows[number]
        while row.op == "not":
            number, outcome = row.args[0], not outcome
            row = self.table.rows[number]
        before = self.decided.setdefault(number, (outcome, site))
        if before[0] != outcome:
            raise NotNamed(f"one condition has two outcomes: {site}", "names", site)


SESSION: ContextVar[Session | None] = ContextVar("names of this run", default=None)


def session() -> Session:
    """The session of the run.

    Raises:
        RuntimeError: there is none.
    """
    found = SESSION.get()
    if found is None:
        raise RuntimeError("a named kernel runs outside twinstep.replay.names.naming")
    return found
