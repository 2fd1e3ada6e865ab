"""`parity sequence-power`: how likely a sequence of actions notices each wrong optimizer class."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from twinstep.parity.cli.interrupt import before_the_end
from twinstep.parity.proof.corpus.sequence_power import Power, power_of
from twinstep.parity.proof.corpus.wrong_classes import WRONG_CLASSES
from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, UsageError
from twinstep.parity.report.progress import progress

# After so many notices a probability is known well enough.
ENOUGH = 30


def sequence_power(most: int, names: tuple[str, ...]) -> int:
    """Measure and print; the exit code is 1 if a default run could miss a class.

    Args:
        most: limit of sequences for each class and dtype.
        names: of classes; empty means all.

    Raises:
        UsageError: there is no such class.
    """
    rows = WRONG_CLASSES
    for name in names:
        if name not in {row.name for row in rows}:
            raise UsageError(f'class "{name}" is unknown, but should be in parity/proof/corpus')
    cells = [(row, dtype) for row in rows for dtype in row.dtypes if not names or row.name in names]
    found: list[Power] = []

    def said() -> str:
        screen = Console(width=None if sys.stdout.isatty() else 120)
        screen.print(_table(sorted(found, key=lambda power: power.each)))
        return f"{len(found)} of {len(cells)} measured"

    # It takes half an hour: what is known by then is printed, whatever ends it.
    before_the_end(said)
    try:
        with progress(len(cells)) as told:
            for row, dtype in cells:
                found.append(power_of(row, dtype, ENOUGH, most))
                told(row.name, 1)
    finally:
        said()
    return EXIT_KEPT if all(power.enough for power in found) else EXIT_BROKEN


def _table(found: list[Power]) -> Table:
    table = Table("class", "reference", "dtype", "noticed", "one sequence", "default run")
    for power in found:
        table.add_row(
            power.row.name,
            power.row.reference,
            power.dtype,
            f"{power.noticed} of {power.sequences}",
            f"{power.each:.1%}",
            f"{power.run:.2%}",
        )
    return table
