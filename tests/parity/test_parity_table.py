"""The table of a run: a column for each law, in lines that a terminal and a file can hold."""

from __future__ import annotations

import io

from rich.console import Console

from twinstep.parity.cli.judge_command import PIPED
from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Key, Ledger, Status
from twinstep.parity.report.table import HEADINGS, print_table

LONGEST = "triton.update_scale_dynamic"


def printed(status: Status, reasons: tuple[str, ...] = ("",)) -> str:
    """The table of one kernel with the longest name, a row for each reason."""
    cells = {}
    for row, reason in enumerate(reasons):
        for law in LAWS:
            key = Key(
                operation="update_scale_dynamic",
                kernel=LONGEST,
                dtype=f"fp32-to-bf1{row}",
                law=law,
                engine="replay",
            )
            cells[key] = Cell(key=key, status=status, reason=reason, calls=1)
    screen = Console(width=PIPED, file=io.StringIO())
    print_table(screen, Ledger(declared=tuple(cells), cells=cells))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_every_law_has_a_heading_that_is_not_cut() -> None:
    text = printed(Status.PASSED)
    assert "…" not in text
    (heading,) = (line.split() for line in text.splitlines() if "kernel" in line.split())
    assert [HEADINGS[law] for law in LAWS] == heading[3 : 3 + len(LAWS)]


def test_reasons_that_differ_in_registers_alone_are_one_line() -> None:
    reasons = tuple(f"not liftable: `@%p{n} atom.add.u64 %rd{n}, [%rd0]`, kernel k" for n in (1, 2))
    lines = [line for line in printed(Status.SKIPPED, reasons).splitlines() if "skip:" in line]
    assert lines == [f"skip: not liftable: `atom.add.u64`, kernel k ({2 * len(LAWS)} cells)"]
