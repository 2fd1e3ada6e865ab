"""The line of a user's file that an exception, a frame or a compiler's message is about."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

OURS = Path(__file__).parents[3]
# Packages may lie in a folder of their own that is only on the path.
PACKAGES = str(Path(torch.__file__).parents[1])
INSTALLED = (
    *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")},
    PACKAGES,
)
LIBRARIES = (*INSTALLED, *(str(OURS / folder) for folder in ("parity", "replay")))


def is_library(file: str) -> bool:
    """True for files of Python, of installed packages and of the judge."""
    return file.startswith((*LIBRARIES, "<")) or not file


def _innermost(places: Iterable[tuple[str, int]]) -> str:
    """The last of some places, outermost first, that is no library's; empty if there is none."""
    users = [place for place in places if not is_library(place[0])]
    return f" [{users[-1][0]}:{users[-1][1]}]" if users else ""


def place_of(error: BaseException) -> str:
    """File and line, in brackets, where an exception left the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost((frame.filename, frame.lineno or 0) for frame in frames[1:])


def place_in(frame: FrameType | None) -> str:
    """File and line, in brackets, at which the user's code is."""
    places: list[tuple[str, int]] = []
    while frame is not None:
        places.insert(0, (frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _innermost(places)


def line_of(error: BaseException) -> str:
    """Place of an error of Triton's compiler in the kernel's source; of any other, `place_of`."""
    link: BaseException = error
    while link.__cause__ is not None and type(link.__cause__).__module__.startswith("triton"):
        link = link.__cause__
    source, line = getattr(link, "src", None), getattr(getattr(link, "node", None), "lineno", 0)
    place = _defined(error, source) if isinstance(source, str) and line else None
    return f" [{place[0]}:{place[1] + line - 1}]" if place else place_of(error)


def _defined(error: BaseException, source: str) -> tuple[str, int] | None:
    """File and first line of the function under `@triton.jit` whose source this is."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            function = getattr(value, "fn", None)
            if inspect.isfunction(function) and getattr(value, "src", None) == source:
                lines, first = inspect.getsourcelines(function)
                skipped = next(at for at, row in enumerate(lines) if row.lstrip().startswith("def"))
                return function.__code__.co_filename, first + skipped
    return None
