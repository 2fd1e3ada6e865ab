"""Digests of what the reference computes on fixed inputs: data, and how it is read and written.

A digest that moves means that arithmetic moved: ours, or that of the torch which computed it. The
code that computes digests is `parity.proof.gates.digests`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCHEMA = 1
FILE = Path(__file__).parent / "digests.json"


@dataclass(frozen=True, kw_only=True)
class Digests:
    """A set of digests and the torch that they were computed with.

    Attributes:
        torch: its version.
        digests: SHA-256 in hexadecimal by case.
    """

    torch: str
    digests: Mapping[str, str]


def to_text(digests: Digests) -> str:
    """The file's content; equal digests give equal text."""
    row = {"schema": SCHEMA, "torch": digests.torch, "digests": dict(digests.digests)}
    return json.dumps(row, indent=1, sort_keys=True) + "\n"


def from_text(text: str, where: str) -> Digests:
    """Read a set of digests.

    Raises:
        ValueError: the text is no JSON, or its schema is unknown.
    """
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} should be JSON, but: {error}") from error
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        raise ValueError(f"{where} should have schema {SCHEMA}; record it again")
    return Digests(torch=row["torch"], digests=row["digests"])


def read(path: Path = FILE) -> Digests:
    """Read a file; see `from_text`."""
    return from_text(path.read_text(), path.name)
