"""One real defect that a project shipped: what it was and where it can be read about."""

from __future__ import annotations

from dataclasses import dataclass

DEEPSPEED = "deepspeedai/DeepSpeed (its source)"


@dataclass(frozen=True)
class Bug:
    """One real defect.

    Attributes:
        title: what went wrong, in a few words.
        places: issues, pull requests or commits; empty for a pattern without a public thread.
        waits_for: empty, or the component that must exist before the row can be replanted.
        test: of the judge itself, for a defect of checks; in `tests/test_parity_checks.py`.
    """

    title: str
    places: tuple[str, ...]
    waits_for: str = ""
    test: str = ""


def bug(title: str, *places: str, waits_for: str = "", test: str = "") -> Bug:
    """A row."""
    return Bug(title, places, waits_for, test)
