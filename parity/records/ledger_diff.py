"""Checks that a change loosened, from the ledgers of two runs (`parity run --json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import SCHEMA

Name = tuple[str, str, str, str, str]
Record = Mapping[str, object]
NAMES = ("operation", "kernel", "dtype", "law", "engine")
COUNTS = ("calls", "elements", "sequences")
RATIO = 1e-9  # what writing a number to JSON and reading it may move


@dataclass(frozen=True)
class Document:
    """A ledger as a file has it.

    Attributes:
        cells: by name.
        bounds: typical width of a bound in ULP, by operation, dtype and output.
    """

    cells: Mapping[Name, Record]
    bounds: Mapping[str, float]


@dataclass
class Difference:
    """Changes that loosen a check, and the other changes.

    Attributes:
        looser: one sentence each.
        tighter: likewise.
    """

    looser: list[str] = field(default_factory=list)
    tighter: list[str] = field(default_factory=list)


def read(path: str) -> Document:
    """Read a ledger.

    Raises:
        UsageError: there is no such file, or it is no ledger of this schema.
    """
    try:
        document = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror} [parity ledger]") from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error} [parity ledger]") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{path} has schema {schema!r}, but should have {SCHEMA!r}")
    cells = {_name(row): row for row in document["cells"]}
    return Document(cells, document.get("bounds", {}))


def _name(row: Record) -> Name:
    return cast(Name, tuple(str(row[name]) for name in NAMES))


def difference(old: Document, new: Document) -> Difference:
    """Compare two ledgers cell by cell, then the bounds that both have."""
    found = Difference()
    for name, before in old.cells.items():
        after = new.cells.get(name)
        if after is None:
            if before["status"] in ("passed", "failed"):
                found.looser.append(f"{_title(name)}: was {before['status']}, is gone")
            continue
        _compare(_title(name), before, after, found)
    added = [name for name in new.cells if name not in old.cells]
    found.tighter += [f"{_title(name)}: is new" for name in added]
    for output, width in old.bounds.items():
        now = new.bounds.get(output, width)
        text = f"{output}: bound of {width:.4g} ULP, now {now:.4g}"
        if now > width * (1 + RATIO):
            found.looser.append(text)
        elif now < width * (1 - RATIO):
            found.tighter.append(text)
    return found


def _title(name: Name) -> str:
    operation, kernel, dtype, law, engine = name
    return f"{operation} {kernel} {dtype} {law} on {engine}"


def _compare(title: str, before: Record, after: Record, found: Difference) -> None:
    was, now = before["status"], after["status"]
    if was != now:
        reason = f" ({after['reason']})" if after.get("reason") else ""
        looser = was == "passed" or (was == "failed" and now != "passed")
        (found.looser if looser else found.tighter).append(f"{title}: {was}, now {now}{reason}")
        return
    kinds = (before.get("arithmetic"), after.get("arithmetic"))
    if kinds == ("exact", "bounded"):
        found.looser.append(f"{title}: exact, now bounded")
    elif kinds == ("bounded", "exact"):
        found.tighter.append(f"{title}: bounded, now exact")
    for count in COUNTS if now == "passed" else ():
        less, more = int(str(after.get(count, 0))), int(str(before.get(count, 0)))
        if less < more:
            found.looser.append(f"{title}: {more} {count}, now {less}")
            break
