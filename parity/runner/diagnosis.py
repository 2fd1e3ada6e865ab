"""Diagnoses of a run: one report for each defect, not one for each law that it breaks.

Inside a row (one kernel on one dtype combination) the judge has decided already which failures one
defect explains, see `parity/runner/signature.py`. Rows of one kernel are put together here: where
both have a known cause, if it is the same; where neither has, if the kind of violation is the same
and so is something that is wrong. All else stays apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from twinstep.parity.laws import LAWS
from twinstep.parity.laws.finding import KINDS
from twinstep.parity.records.ledger import Cell, Ledger, Status

WIDTH = 100
Row = tuple[str, str, str, str]


@dataclass
class Diagnosis:
    """One defect of one kernel.

    Attributes:
        cells: that break because of it; `leading` is the one to report.
    """

    cells: list[Cell] = field(default_factory=list)

    @property
    def leading(self) -> Cell:
        """The failure that says most: by kind, then with a known cause, a repro file, by law."""
        return min(self.cells, key=_rank)

    def text(self) -> str:
        """The leading failure in full, and the names of the others."""
        others = "; ".join(self._others())
        line = textwrap.fill(
            others, WIDTH, initial_indent="  also     ", subsequent_indent=" " * 11
        )
        return self.leading.failure + (f"\n{line}" if others else "")

    def _others(self) -> Iterator[str]:
        """Other broken laws with their dtype combinations."""
        dtypes: dict[str, list[str]] = {}
        for cell in self.cells:
            if cell is not self.leading:
                dtypes.setdefault(cell.key.law, []).append(cell.key.dtype)
        for law, names in dtypes.items():
            yield f"{law} ({', '.join(names)})"
        if dtypes:
            yield f"{len(self.cells)} cells in all"


def diagnoses(ledger: Ledger) -> list[Diagnosis]:
    """The defects that a ledger shows, in the order of its cells."""
    failed = ledger.with_status(Status.FAILED)
    found: list[Diagnosis] = []
    homes: dict[tuple[Row, str], Diagnosis] = {}
    for cell in failed:
        if cell.like:
            continue
        home = next((one for one in found if _one_defect(one.cells[0], cell)), None)
        if home is None:
            home = Diagnosis()
            found.append(home)
        home.cells.append(cell)
        homes[_row(cell), cell.key.law] = home
    for cell in failed:
        if cell.like:
            # A leader can be missing where a process died between the two.
            home = homes.get((_row(cell), cell.like))
            if home is None:
                home = Diagnosis()
                found.append(home)
            home.cells.append(cell)
    return found


def _row(cell: Cell) -> Row:
    return cell.key.operation, cell.key.kernel, cell.key.dtype, cell.key.engine


def _one_defect(one: Cell, other: Cell) -> bool:
    """True if two failures that stand for their rows have one cause."""
    same_kernel = (one.key.operation, one.key.kernel) == (other.key.operation, other.key.kernel)
    if not same_kernel or one.key.engine != other.key.engine or _row(one) == _row(other):
        return False
    if one.cause or other.cause:
        return one.cause == other.cause
    return one.kind == other.kind and bool(set(one.wrong) & set(other.wrong))


def _rank(cell: Cell) -> tuple[bool, int, bool, bool, int]:
    laws = list(LAWS)
    kind = KINDS.index(cell.kind) if cell.kind in KINDS else 0
    law = laws.index(cell.key.law) if cell.key.law in laws else len(laws)
    return bool(cell.like), kind, not cell.cause, not cell.repro, law
