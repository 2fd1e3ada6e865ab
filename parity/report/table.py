"""Results on the screen: a row for each kernel, what was skipped and why, failures, the verdict.

Every line fits into the width of the screen; a name that is longer has a line of its own.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinstep.parity.laws import LAWS
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.records.names import number
from twinstep.parity.records.proof import Proof
from twinstep.parity.report.proofs import column, print_proofs
from twinstep.parity.report.words import print_hanging
from twinstep.parity.runner.diagnosis import diagnoses

MARKS = {
    Status.PASSED: ("ok", "green"),
    Status.FAILED: ("FAIL", "bold red"),
    Status.SKIPPED: ("skip", "yellow"),
    Status.EXPECTED_FAILURE: ("xfail", "yellow"),
    Status.NOT_CLAIMED: ("not claimed", "dim"),
    Status.CANNOT_JUDGE: ("cannot judge", "bold yellow"),
}
# Of an instruction its opcode is enough here; the registers differ from dtype to dtype.
OPERANDS = re.compile(r"`(?:@\S+ )?([a-z][\w.:]*\.\w+) [^`]*`")
DTYPES_WIDTH = 14
REASONS = 5
Row = tuple[str, str, str]
NOTHING: Mapping[str, str] = {}


def mark(status: Status) -> tuple[str, str]:
    """Word and style of a status."""
    return MARKS.get(status, (status.value, "yellow"))


def print_table(console: Console, ledger: Ledger, verbose: bool = False) -> None:
    """Print a row for each kernel and engine, reasons and counts.

    Args:
        console: to print on.
        ledger: of the run.
        verbose: name every law and every reason.
    """
    kernels, optimizers = _rows(ledger, whole=False), _rows(ledger, whole=True)
    if verbose:
        for row, cells in [*kernels.items(), *optimizers.items()]:
            _print_laws(console, row, cells)
    proved: dict[str, list[Proof]] = {}
    for proof in ledger.proofs:
        proved.setdefault(proof.kernel, []).append(proof)
    failed = ledger.with_status(Status.FAILED)
    rejected = {(cell.key.kernel, cell.key.dtype) for cell in failed}
    columns = {name: column(proofs, rejected) for name, proofs in proved.items()}
    _print_rows(console, "kernel", kernels, columns)
    _print_rows(console, "optimizer", optimizers)
    print_proofs(console, ledger.proofs, verbose, rejected)
    for word, count, reason in _reasons(ledger, verbose):
        print_hanging(console, f"{word} {count:>4}  ", reason.split())
    for (law, note), names in _notes(ledger).items():
        print_hanging(console, "note  ", f"{', '.join(names)}: {note} ({law}: no failure)".split())
    counted = [f"{count} {name}" for name, count in ledger.counts().items() if count]
    print_hanging(console, f"{number(len(ledger.declared), 'cell')} declared: ", _listed(counted))


def _rows(ledger: Ledger, whole: bool) -> dict[Row, list[Cell]]:
    """Cells of each kernel or whole optimizer; what is not claimed at all is left out."""
    rows: dict[Row, list[Cell]] = {}
    for key, cell in ledger.cells.items():
        if (key.law not in LAWS) is whole:
            rows.setdefault((key.kernel, key.operation, key.engine), []).append(cell)
    return {row: found for row, cells in rows.items() if (found := _claimed(cells))}


def _claimed(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of the dtypes that have another status than "not claimed"."""
    claimed = {cell.key.dtype for cell in cells if cell.status is not Status.NOT_CLAIMED}
    return [cell for cell in cells if cell.key.dtype in claimed]


def _print_rows(
    console: Console,
    title: str,
    rows: dict[Row, list[Cell]],
    proved: Mapping[str, str] = NOTHING,
) -> None:
    if not rows:
        return
    seen = {cell.status for cells in rows.values() for cell in cells} - {Status.NOT_CLAIMED}
    statuses = [status for status in Status if status in seen]
    headings = ["engine", "dtypes", *(mark(status)[0] for status in statuses)]
    lines = {row: _columns(row, cells, statuses) for row, cells in rows.items()}
    if proved:
        headings.append("proved")
        for row, texts in lines.items():
            texts.insert(-1, proved.get(row[0], ""))
    if any(line[-1] for line in lines.values()):
        headings.append("error/bound" if title == "kernel" else "sequences")
    widths = [
        max(cell_len(text), *(cell_len(line[place]) for line in lines.values()))
        for place, text in enumerate(headings)
    ]
    room = console.width - sum(width + 2 for width in widths)
    name_width = max(cell_len(title), min(room, max(cell_len(row[0]) for row in rows)))
    console.print()
    _print_line(console, title, headings, name_width, widths, "bold")
    for row, line in lines.items():
        name = row[0]
        if cell_len(name) > name_width:
            console.print(Text(name), soft_wrap=True)
            name = ""
        _print_line(console, name, line[: len(headings)], name_width, widths)
        if idle := _not_launched(rows[row]):
            said = f"no launch completed on {', '.join(idle)}: the CPU did the work"
            print_hanging(console, "  note  ", said.split(), "yellow")
        for status, broken in _exceptions(rows[row]):
            word, style = mark(status)
            print_hanging(console, f"  {word}  ", _listed(broken), style)
        accepts = {name: why for cell in rows[row] for name, why in cell.accepts.items()}
        for name, why in accepts.items():
            print_hanging(console, f"  accepts {name}: ", why.split(), "yellow")
    console.print()


def _columns(row: Row, cells: Sequence[Cell], statuses: Sequence[Status]) -> list[str]:
    dtypes = list(dict.fromkeys(cell.key.dtype for cell in cells))
    named = " ".join(dtypes)
    counts = Counter(cell.status for cell in cells)
    ratios = [ratio for cell in cells for ratio in cell.worst.values()]
    sequences = sum(cell.sequences for cell in cells)
    idle = _not_launched(cells)
    ran = ["cpu"] * bool(idle) + [row[2]] * (len(idle) < len(dtypes))
    return [
        ", ".join(ran),
        named if len(named) <= DTYPES_WIDTH else f"{len(dtypes)} dtypes",
        *(str(counts[status] or "") for status in statuses),
        f"{max(ratios):.2f}" if ratios else str(sequences or ""),
    ]


def _not_launched(cells: Sequence[Cell]) -> list[str]:
    """Dtypes on which no launch completed on the engine that the row was meant for."""
    ran: dict[str, set[str]] = {}
    for cell in cells:
        if cell.ran or cell.status in (Status.PASSED, Status.FAILED):
            ran.setdefault(cell.key.dtype, set()).add(cell.ran)
    return [dtype for dtype, engines in ran.items() if engines == {"cpu"}]


def _print_line(
    console: Console,
    name: str,
    texts: Sequence[str],
    name_width: int,
    widths: Sequence[int],
    style: str = "",
) -> None:
    """One line of the table: the first two columns to the left, numbers to the right."""
    line = Text(name + " " * (name_width - cell_len(name)), style=style)
    for place, (text, width) in enumerate(zip(texts, widths, strict=True)):
        blank = " " * (width - cell_len(text))
        line.append("  " + (text + blank if place < 2 else blank + text))
    line.rstrip()
    console.print(line, soft_wrap=True)


def _exceptions(cells: Sequence[Cell]) -> Iterator[tuple[Status, list[str]]]:
    """Laws for each status that has no reason below; dtypes where it is not all of them."""
    usual = (Status.PASSED, Status.SKIPPED, Status.NOT_CLAIMED, Status.CANNOT_JUDGE)
    for status in Status:
        laws: dict[str, list[str]] = {}
        for cell in cells:
            if cell.status is status and status not in usual:
                laws.setdefault(cell.key.law, []).append(cell.key.dtype)
        every = len({cell.key.dtype for cell in cells})
        if laws:
            yield (
                status,
                [
                    law if len(dtypes) == every else f"{law} ({' '.join(dtypes)})"
                    for law, dtypes in laws.items()
                ],
            )


def _print_laws(console: Console, row: Row, cells: Sequence[Cell]) -> None:
    """Every law by status; dtypes that ended alike stand together."""
    kernel, operation, engine = row
    console.print()
    console.print(Text(f"{kernel} ({operation}, {engine})", style="bold"), soft_wrap=True)
    ends: dict[str, list[Cell]] = {}
    for cell in cells:
        ends.setdefault(cell.key.dtype, []).append(cell)
    alike: dict[tuple[tuple[str, Status], ...], list[Cell]] = {}
    for found in ends.values():
        alike.setdefault(tuple((c.key.law, c.status) for c in found), []).extend(found)
    for group in alike.values():
        print_hanging(console, "  ", dict.fromkeys(cell.key.dtype for cell in group))
        for status in Status:
            laws = dict.fromkeys(cell.key.law for cell in group if cell.status is status)
            word, style = mark(status)
            if laws:
                print_hanging(console, f"    {word:<13}", laws, style)
        worst = _worst(group)
        if worst:
            print_hanging(console, f"    {'error/bound':<13}", _listed(worst))
        if sequences := sum(cell.sequences for cell in group):
            actions = sum(cell.calls for cell in group)
            over = sum(cell.over_ranks for cell in group)
            ranks = f"{over} of them over ranks, " if over else ""
            said = f"{number(sequences, 'sequence')}, {ranks}{number(actions, 'action')}"
            print_hanging(console, f"    {said}", ())


def _worst(cells: Sequence[Cell]) -> list[str]:
    """Largest error over bound of each output, with the dtype that it was seen in."""
    worst: dict[str, tuple[float, str]] = {}
    for cell in cells:
        for name, ratio in cell.worst.items():
            worst[name] = max(worst.get(name, (0.0, "")), (ratio, cell.key.dtype))
    return [f"{name} {ratio:.2f} ({dtype})" for name, (ratio, dtype) in worst.items()]


def _reasons(ledger: Ledger, verbose: bool) -> list[tuple[str, int, str]]:
    """Word, number of cells and reason of what was not judged, the most frequent first."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in ledger.cells.values():
        if cell.reason and cell.status is not Status.NOT_CLAIMED:
            reason = cell.reason.removeprefix(f"{cell.key.law} is ")
            reason = OPERANDS.sub(r"`\1`", reason) if verbose else _folded(cell, reason)
            found.setdefault((mark(cell.status)[0], reason), []).append(cell)
    rows = sorted(found.items(), key=lambda row: -len(row[1]))
    lines = []
    for (word, reason), cells in rows:
        laws = " ".join(dict.fromkeys(cell.key.law for cell in cells))
        lines.append((word, len(cells), f"{laws}: {reason}"))
    if verbose or len(lines) <= REASONS:
        return lines
    left = lines[REASONS:]
    rest = ("skip", sum(count for _, count, _ in left), f"for {len(left)} more reasons: see -v")
    return [*lines[:REASONS], rest]


def _notes(ledger: Ledger) -> dict[tuple[str, str], dict[str, None]]:
    """Kernels by law and note."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for cell in ledger.cells.values():
        if cell.note:
            found.setdefault((cell.key.law, cell.note), {})[cell.key.kernel] = None
    return found


def _folded(cell: Cell, reason: str) -> str:
    """A reason without what differs from cell to cell: a dtype, an instruction."""
    if cell.status is not Status.SKIPPED:
        return reason
    return reason.removeprefix(f"{cell.key.dtype} ").partition(":")[0]


def print_diagnoses(console: Console, ledger: Ledger, limit: int = 12) -> None:
    """Print one report for each defect."""
    found = diagnoses(ledger)
    for diagnosis in found[:limit]:
        console.print(diagnosis.text(), highlight=False, markup=False, soft_wrap=True)
        console.print()
    if len(found) > limit:
        console.print(f"... and {len(found) - limit} more defects; --json lists every broken cell")


def last_line(ledger: Ledger, seconds: float) -> str:
    """The verdict, and the command to type next."""
    # Where this law is left out, nothing else looks at offsets past 2^31.
    rows = [cell.status for cell in ledger.cells.values() if cell.key.law == "large_index"]
    left, judged = rows.count(Status.SKIPPED), len(rows) - rows.count(Status.NOT_CLAIMED)
    verdict = ledger.verdict() + f" (large_index not judged in {left} of {judged} rows)" * bool(
        left
    )
    said = f"{verdict} in {seconds:.{0 if seconds >= 10 else 1}f} s"
    broken = ledger.with_status(Status.FAILED)
    repro = next((cell.repro for cell in broken if cell.repro), "")
    if repro:
        return f"{said}: {python()} {repro}"
    if not broken and ledger.exit_code():
        return f"{said}: the same command with -v gives every reason"
    return said


def python() -> str:
    """This interpreter as one would type it here."""
    path, here = Path(sys.executable), Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)


def _listed(items: Sequence[str]) -> list[str]:
    """Items with commas between them."""
    return [f"{item}," for item in items[:-1]] + list(items[-1:])


def plain_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without frame; columns of numbers are on the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    return table
