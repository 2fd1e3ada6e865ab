"""The command `parity`, in the process of the tests."""

from __future__ import annotations

import re

import pytest

from twinstep.parity.__main__ import main


def parity(*argv: str) -> int:
    """Run the command with these words; its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    return int(exit_.value.code or 0)


def sentences(error: str) -> list[str]:
    """Lines of standard error without those on progress, which a busy machine has more of."""
    return [line for line in error.splitlines() if not re.fullmatch(r"loading .*, \d+ s", line)]
