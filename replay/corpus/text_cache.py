"""The texts a compiler has made so far, kept in its folder, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

Row = dict[str, object]
Job = tuple[str, Callable[[], Row]]
"""Everything that decides what comes out, and what makes it."""


def rows(jobs: Iterable[Job], file: Path) -> tuple[list[Row], int]:
    """The row of every job, and how many had to be made.

    Args:
        jobs: In any order.
        file: JSON Lines of digest and row; each row is added as soon as it is there.
    """
    known = _read(file)
    found: list[Row] = []
    made = 0
    with file.open("a") as out:
        for decides, make in jobs:
            digest = hashlib.sha256(decides.encode()).hexdigest()
            if digest not in known:
                known[digest] = make()
                made += 1
                out.write(json.dumps([digest, known[digest]]) + "\n")
                out.flush()
            found.append(known[digest])
    return found, made


def _read(file: Path) -> dict[str, Row]:
    """The rows kept; a last line that was cut off is taken away, so that the next one is whole."""
    if not file.exists():
        return {}
    whole, _, cut = file.read_text().rpartition("\n")
    if cut:
        file.write_text(whole + "\n" if whole else "")
    return {digest: row for digest, row in map(json.loads, whole.splitlines())}
