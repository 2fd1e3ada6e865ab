"""Errors before a law is judged; every class carries the exit code it leads to."""

from __future__ import annotations

EXIT_KEPT = 0
EXIT_BROKEN = 1
EXIT_USAGE = 2
EXIT_TOO_LITTLE = 3
EXIT_NO_DEVICE = 4


class UsageError(Exception):
    """Wrong usage or unreadable input: one sentence, no traceback, exit code 2."""

    exit_code = EXIT_USAGE


class NoDeviceError(UsageError):
    """A device that was asked for is missing: exit code 4."""

    exit_code = EXIT_NO_DEVICE


class ReferenceFault(Exception):
    """The reference of an operation refuses a drawn case: the operation is described wrongly."""


class CannotJudge(Exception):
    """A law cannot be judged here, for want of memory or time: the cell is skipped by name."""


class JudgeFault(Exception):
    """An error inside the judge itself or inside replay: nothing is known of the kernel."""


class KernelTimeout(BaseException):
    """A kernel did not return in time. Not an `Exception`, so that no kernel swallows it."""
