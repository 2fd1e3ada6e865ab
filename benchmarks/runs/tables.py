"""A run as a table, and two runs beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from twinstep.benchmarks.beside.rows import AGAIN, CEILING, OURS, PART, PEER
from twinstep.benchmarks.runs.history import rows_by_name
from twinstep.benchmarks.runs.results import BIG, Document, title
from twinstep.parity.report.table import plain_table

COLUMNS = ("what", "row", "ms", "time / ours", "faster", "of ceiling")
HOLD = (
    "time / ours: above 1 the first row is faster; in brackets an interval of 95 %, over processes"
)


def run_table(document: Document) -> Table:
    """A line for each row: time, ratio to ours with its interval, share of the ceiling."""
    table = plain_table(HOLD, COLUMNS[:2], COLUMNS[2:])
    for line in lines(document):
        table.add_row(*line)
    return table


def lines(document: Document) -> Iterator[tuple[str, ...]]:
    """Cells of every line of the table; what is absent has its reason for a verdict."""
    for group in document["groups"]:
        name = f"{group['operation']} {group['dtype']} {title(group)}"
        for row in told(group):
            yield name, shown(row), *cells(row, group["bytes"])
            name = ""
        for absent, reason in group["absent"].items():
            yield "", absent, "", "", reason, ""


def faster(row: Document) -> str:
    """The faster side, as far as the interval tells.

    >>> faster({"family": "peer", "times_ours": [1.1, 1.2, 1.3]})
    'ours'
    >>> faster({"family": "peer", "times_ours": [0.9, 1.2, 1.6]})
    'not told apart'
    """
    low, _, high = row["times_ours"]
    if row["family"] != PEER:
        return ""
    if low is None or high is None:
        return "one process: unsure"
    return "ours" if low > 1.0 else "theirs" if high < 1.0 else "not told apart"


def versions(document: Document) -> str:
    """Peers' packages with their versions, in one line."""
    known = {
        row["version"]
        for group in document["groups"]
        for row in group["rows"]
        if row["family"] == PEER
    }
    return ", ".join(sorted(known))


def quietness(document: Document) -> str:
    """Load of the machine: before, and by the work of others during the run."""
    others = document.get("others")
    during = "" if others is None else f"; others took {others:.1%} of all cores meanwhile"
    return f"load before it began {document['load']}{during}"


def told(group: Document) -> list[Document]:
    """Rows of a group that mean something: of small calls no ceiling, since the host decides."""
    rows = [row for row in group["rows"] if row["family"] != CEILING or group["bytes"] >= BIG]
    last = [row for row in rows if row["family"] == PART]
    found = []
    for row in rows:
        if row["family"] != PART:
            found.append(row)
            found += [part for part in last if part["name"].startswith(f"{row['name']}: ")]
    return found


def shown(row: Document) -> str:
    """Name of a row, with a word where it is neither ours nor a peer's."""
    if row["family"] == CEILING:
        return f"ceiling: {row['name']}"
    if row["family"] == PART:
        return f"- its timer {row['name'].rpartition(': ')[2]}"
    return (
        f"{row['name'].removesuffix(AGAIN)} (A/A)" if row["name"].endswith(AGAIN) else row["name"]
    )


def cells(row: Document, moved: int) -> tuple[str, str, str, str]:
    """Milliseconds, ratio, verdict, share; of small calls no share, since the host decides."""
    share = row["of_ceiling"][1]
    ceiling = row["family"] in (CEILING, PART) or moved < BIG
    ratio = bracketed(row["times_ours"])
    return f"{row['ms']:.4g}", ratio, faster(row), "" if ceiling else f"{share:.2f}"


def bracketed(interval: Sequence[float | None]) -> str:
    """An estimate with its interval.

    >>> bracketed([1.0, 1.5, 2.25]), bracketed([None, 0.001, None])
    ('1.50 (1.00 to 2.25)', '0.0010')
    """
    low, middle, high = interval
    assert middle is not None
    digits = 2 if middle >= 0.1 else 4
    if low is None or high is None:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compared(old: Document, new: Document) -> Table:
    """Rows of two runs with one key: what was and is, and how far the runs alone differ."""
    table = plain_table(
        "two runs, not in pairs: a difference is news only beside those of the peers' rows",
        ("row", "family"),
        ("before, ms", "after, ms", "after / before"),
    )
    before = dict(rows_by_name(old))
    for name, row in rows_by_name(new):
        known = before.get(name)
        if known is not None and row["family"] in (OURS, PEER):
            ratio = row["ms"] / known["ms"]
            table.add_row(
                name, row["family"], f"{known['ms']:.4g}", f"{row['ms']:.4g}", f"{ratio:.2f}"
            )
    return table
