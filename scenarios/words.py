"""Words of a command line as numbers and files: refused before a run, not after it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from twinstep.scenarios.pictures import SUFFIXES


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that are not smaller."""

    def number(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r} should be a whole number, at least {least}")
        return int(word)

    return number


def new_file(word: str) -> Path:
    """A file to write, in a folder that exists: found out before the run, not after it."""
    path = Path(word)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{word!r} should lie in a folder that exists")
    return path


def new_picture(word: str) -> Path:
    """An image file to write, in a format that can be drawn."""
    if Path(word).suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{word!r} should end in {', '.join(SUFFIXES)}")
    return new_file(word)
