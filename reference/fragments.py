"""Where a parameter lies: in a flat buffer, and in the piece of it that this rank owns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FragmentAddress:
    """A run of elements.

    Attributes:
        numel: how many.
        start: the first one.
    """

    numel: int
    start: int
