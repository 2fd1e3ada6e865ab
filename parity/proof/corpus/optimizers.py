"""Known-wrong and harmless optimizer classes, one record each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from twinstep.parity.runner.calls.process_state import put_back
from twinstep.parity.sequences.judge import TwinEffort, judge_twin, over_ranks, twin_engine, usual
from twinstep.parity.sequences.registry import Twin, borrowed_twins, register_optimizer

Cls = TypeVar("Cls")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A class against one of the reference.

    Attributes:
        cls: the class.
        reference: name of the class that decides what is right.
        says: one sentence, what is wrong or merely written otherwise.
        dtypes: dtypes it is judged on; a fault shows in each of them.
        arithmetic: what it claims to be.
        private: attributes that are its own business.
        flat: its state may be views of one buffer.
        bugs: rows of docs/reference/bugs.md that it replants.
        over_ranks: its fault shows over ranks alone.
    """

    cls: type
    says: str
    reference: str = "FusedAdam"
    dtypes: tuple[str, ...] = ("fp32",)
    arithmetic: str = "exact"
    private: tuple[str, ...] = ()
    flat: bool = False
    bugs: tuple[str, ...] = ()
    over_ranks: bool = False

    @property
    def name(self) -> str:
        """The class's name."""
        return self.cls.__name__


def put(shelf: list[Optimizer], *bugs: str, **fields: object) -> Callable[[type[Cls]], type[Cls]]:
    """Decorator of a class: it goes on the shelf; its docstring is the sentence.

    Args:
        shelf: gets one more record.
        bugs: rows of docs/reference/bugs.md that it replants.
        fields: those of `Optimizer`.
    """
    record: Callable[..., Optimizer] = Optimizer

    def decorate(cls: type[Cls]) -> type[Cls]:
        shelf.append(record(cls=cls, says=str(cls.__doc__), bugs=bugs, **fields))
        return cls

    return decorate


def twin_of(row: Optimizer) -> Twin:
    """The row as the registry would hold it; the registry forgets it at once."""
    with borrowed_twins() as found:
        register_optimizer(
            f"wrong.{row.name}",
            reference=row.reference,
            arithmetic=row.arithmetic,
            dtypes=row.dtypes,
            private=row.private,
            flat=row.flat,
        )(row.cls)
    return found[0]


def judged_optimizer(row: Optimizer, dtype: str, sequences: int) -> str:
    """The failure text of a row, empty if it passes.

    Args:
        row: the class.
        dtype: of the parameters.
        sequences: as many as a run has on one rank; a fault over ranks gets those over ranks alone.
    """
    twin = twin_of(row)
    alone = TwinEffort(
        sequences=usual(twin.rules, sequences), over_ranks=0, shrunk_by=0, repros=None
    )
    # Those over ranks take longest, and see little of what is wrong on one.
    efforts = [] if row.over_ranks else [alone]
    if row.over_ranks or twin.over_ranks():
        ranked = twin.over_ranks() or twin
        number = over_ranks(ranked.rules, sequences)
        efforts.append(replace(alone, sequences=1, over_ranks=number))
    for effort in efforts:
        # A class may leave gradients unrecorded: then none that comes later does anything.
        with put_back():
            failure = judge_twin(twin, dtype, twin_engine(twin), effort).failure
        if failure:
            return failure
    return ""
