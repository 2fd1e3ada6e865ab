"""Judge the twins of a selection and put their cells into the ledger of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from twinstep.parity.records.ledger import Cell, Ledger
from twinstep.parity.registry.selection import Selection
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.judge import LAW, TwinEffort, judge_twin, twin_engine
from twinstep.parity.sequences.registry import DTYPES, Twin, twins

SHARE = 2


def names_of(known: Sequence[Twin]) -> Selection | None:
    """Values of --op, --kernel, --dtype and --law that these twins add."""
    if not known:
        return None
    return Selection(
        operations=tuple(twin.reference.__name__ for twin in known),
        names=tuple(twin.name for twin in known),
        dtypes=tuple(DTYPES),
        laws=(LAW,),
    )


def chosen_twins(selection: Selection, known: Sequence[Twin]) -> list[Twin]:
    """The twins that are selected; the operation of a twin is its reference's name."""
    return [
        twin
        for twin in known
        if (not selection.operations or twin.reference.__name__ in selection.operations)
        and (not selection.names or twin.name in selection.names)
        and (not selection.laws or LAW in selection.laws)
    ]


def effort_of(examples: int, seed: int | None, repros: str | None) -> TwinEffort:
    """As hard as kernels are judged: two sequences for each case of the value law."""
    return TwinEffort(sequences=max(1, SHARE * examples), seed=seed or 0, repros=repros)


def judge_twins(
    selection: Selection,
    known: Sequence[Twin],
    effort: TwinEffort,
    finished: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """One cell for each selected twin and dtype; what a twin does not claim has one as well."""
    cells = []
    for twin in chosen_twins(selection, known):
        engine = twin_engine(twin, selection.engine)
        for dtype in DTYPES:
            if selection.dtypes and dtype not in selection.dtypes:
                continue
            cells.append(judge_twin(twin, dtype, engine, effort))
            finished(cells[-1])
    return cells


def house_sequences(selection: Selection, effort: TwinEffort) -> list[Cell]:
    """`judge_twins` of our own optimizers, in a process that has not registered them yet."""
    torch.set_num_threads(1)
    register_our_optimizers()
    return judge_twins(selection, twins(), effort)


def with_twins(ledger: Ledger, cells: Sequence[Cell]) -> Ledger:
    """The ledger with these cells declared and recorded."""
    declared = (*ledger.declared, *(cell.key for cell in cells))
    both = Ledger(declared, ledger.asked_device, dict(ledger.cells))
    for cell in cells:
        both.add(cell)
    return both
