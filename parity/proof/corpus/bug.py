"""One real defect that a project shipped: what it was and where it can be read about."""

from __future__ import annotations

from dataclasses import dataclass

DEEPSPEED = "deepspeedai/DeepSpeed (its source)"
CHECKS = "tests/parity/test_parity_checks.py::"


@dataclass(frozen=True)
class Bug:
    """One real defect.

    Attributes:
        title: what went wrong, in a few words.
        places: issues, pull requests or commits; empty for a pattern without a public thread.
        waits_for: empty, or the component that must exist before the row can be replanted.
        test: empty, or the node id of a test that plants the defect and demands that it is
            noticed; that of a defect of checks is in `CHECKS`.
    """

    title: str
    places: tuple[str, ...]
    waits_for: str = ""
    test: str = ""


def bug(title: str, *places: str, waits_for: str = "", test: str = "") -> Bug:
    """A row."""
    return Bug(title, places, waits_for, test)
