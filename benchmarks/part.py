"""Parts of the check: functions that return figures, or raise the reason why they cannot."""

from __future__ import annotations

from collections.abc import Callable

Figures = dict[str, object]
Part = Callable[[], Figures]


class Skipped(Exception):
    """This machine cannot run the part; the message is the reason, and it is reported by name."""


class Broken(Exception):
    """The part ran and found something wrong; the message says what and where."""


def require_gpu() -> None:
    """Skip where torch shows no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise Skipped("no CUDA GPU here")
