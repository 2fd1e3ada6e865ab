"""Operations of pure instructions, and the tables that give them to forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from twinstep.replay.dtypes import Array


@dataclass(frozen=True)
class Operation:
    """The function of one instruction, with its types.

    Attributes:
        function: Takes one array per source, returns one array or a tuple of one per result.
        sources: PTX types of the sources.
        results: PTX types of the results.
        canonical: NaN results carry no payload on the device; they become the canonical NaN
            as soon as their bits can be seen.
        charge: Name of the approximate instruction to charge, or "".
        first: Computes the first result alone, where the others are not wanted.
        plain: Does the same where the second source is a constant below the width of the first,
            and takes both in the type of the first.
        variadic: There may be more sources, all of the first one's type.
    """

    function: Callable[..., Array | tuple[Array, ...]]
    sources: tuple[str, ...]
    results: tuple[str, ...]
    canonical: bool = False
    charge: str = ""
    first: Callable[..., Array] | None = None
    plain: np.ufunc | None = None
    variadic: bool = False


Resolver = Callable[[tuple[str, ...]], Operation]
"""An opcode of one of its forms, split at the dots, to what it computes."""

Table = Mapping[str, Resolver]
"""Lines of the grammar (see `forms`), each with the resolver of its forms."""
