"""Reasons: the outcome of a case, from the error that ended it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from triton.compiler.errors import CompilationError

from tools.foreign.outcomes import Outcome
from twinstep.replay import CannotReplay, LimitReached, ReplayError

CODE = ("ptx", "asm", "ttgir", "llir", "ttir", "sass", "amdgcn")
"""Names, in a failing line of a test, of text that the compiler made."""


class TooSlow(BaseException):
    """A case that took longer than its limit; no `except Exception` of a test may swallow it."""


def of_error(error: BaseException) -> Outcome:
    """The outcome of a case that ended with this error."""
    for each in _chain(error):
        if isinstance(each, TooSlow | LimitReached):
            return Outcome("too slow", type(each).__name__)
        if isinstance(each, CannotReplay):
            named = each.place or each.construct in ("cluster", "tensor descriptor")
            outcome = "refused" if each.construct and named else "refused without a place"
            return Outcome(outcome, each.construct or str(each), each.place)
        if isinstance(each, ReplayError):
            return Outcome("fault reported", f"{type(each).__name__}: {each}")
    if isinstance(error, CompilationError):
        return Outcome("not compiled", type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames]
    words = f"{type(error).__name__} at `{lines[-1]}`: {error}"[:400]
    # Some tests compare by themselves, and raise.
    raised = "/python/test/" in frames[-1].filename and lines[-1].startswith("raise ")
    if not isinstance(error, AssertionError) and not raised:
        return Outcome("other error", words)
    if any(name in line for line in lines[-2:] for name in CODE):
        return Outcome("assertion about code", lines[-1])
    return Outcome("wrong result", words)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
