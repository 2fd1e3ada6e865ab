"""History of runs on one device: a file of JSON in the repository, one series for each key.

A run on the same device under another driver, clock or version starts a new series: its times are
never set beside those of another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinstep.benchmarks.beside.rows import CEILING, OURS
from twinstep.benchmarks.runs.key import slug
from twinstep.benchmarks.runs.results import Document, title
from twinstep.parity.records.errors import UsageError

FOLDER = Path(__file__).resolve().parents[1] / "results" / "history"
KEPT = 400  # runs of a series
Point = dict[str, Any]


def load(file: Path) -> list[Document]:
    """All series of a device; none where there is no file.

    Raises:
        UsageError: the file is no history.
    """
    if not file.exists():
        return []
    try:
        found: list[Document] = json.loads(file.read_text())["series"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no history: {type(error).__name__} {error}") from None
    return found


def record(document: Document, folder: Path = FOLDER) -> tuple[Path, bool]:
    """Enter a run; the file, and whether its key began a new series."""
    file = folder / f"{slug(document['key'])}.json"
    known = load(file)
    series = next((one for one in known if one["key"] == document["key"]), None)
    new = series is None
    if series is None:
        series = {"key": document["key"], "runs": []}
        known.append(series)
    runs = series["runs"]
    stamp = document["stamp"]
    runs.append({"time": stamp["time"], "commit": stamp["commit"], "rows": points(document)})
    series["runs"] = runs[-KEPT:]
    folder.mkdir(parents=True, exist_ok=True)
    # One line for each run: a change of a file shows the runs that it adds.
    text = ",\n".join(
        f'  {{"key": {json.dumps(one["key"])}, "runs": [\n'
        + ",\n".join(f"    {json.dumps(run)}" for run in one["runs"])
        + "\n  ]}"
        for one in known
    )
    file.write_text(f'{{"schema": 1, "series": [\n{text}\n]}}\n')
    return file, new


def points(document: Document) -> dict[str, Point]:
    """Family, milliseconds and share of the ceiling of every row but the ceilings."""
    return {
        name: {"family": row["family"], "ms": row["ms"], "of_ceiling": row["of_ceiling"][1]}
        for name, row in rows_by_name(document)
        if row["family"] != CEILING
    }


def rows_by_name(document: Document) -> Iterator[tuple[str, Document]]:
    """Every row under a name of its own."""
    for group in document["groups"]:
        for row in group["rows"]:
            yield f"{row['name']}: {group['operation']} {group['dtype']} {title(group)}", row


def exported(document: Document) -> list[Document]:
    """Our rows as github-action-benchmark reads them: its tool customSmallerIsBetter."""
    found = []
    for name, row in rows_by_name(document):
        if row["family"] != OURS:
            continue
        low, _, high = row["times_ours"]
        spread = "" if low is None else f"{100 * (high - low) / 2:.1f}% of itself"
        extra = f"{row['of_ceiling'][1]} of the ceiling, {row['gb_s']} GB/s"
        entry = {"name": name, "unit": "ms", "value": row["ms"], "extra": extra}
        found.append(entry | ({"range": spread} if spread else {}))
    return found
