"""The command `parity`, in the process of the tests."""

from __future__ import annotations

import pytest

from twinstep.parity.__main__ import main


def parity(*argv: str) -> int:
    """Run the command with these words; its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    return int(exit_.value.code or 0)
