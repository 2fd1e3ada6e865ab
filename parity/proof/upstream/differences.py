"""Every known difference between DeepSpeed's optimizers and our default, from `differences.toml`.

A row is one field of `Compat`, or something that no field brings back. Its evidence is a count of
live configurations, a scene, or both; a test fails where there is neither.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One row.

    Attributes:
        field: of `Compat`, which brings it back; empty where none does.
        edges: ids in the edge table.
        theirs: what DeepSpeed does.
        side: whose doing it is, "their bug" or "our choice".
        reason: why we do otherwise.
        scene: where it is shown; empty where the live runs alone show it.
        measured: which number of the live runs shows it, where no field does.
    """

    field: str = ""
    edges: str
    theirs: str
    side: str
    reason: str
    scene: str = ""
    measured: str = ""


DIFFERENCES = tuple(
    Difference(**row)
    for row in tomllib.loads(Path(__file__).with_name("differences.toml").read_text())["difference"]
)
