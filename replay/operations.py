"""The table of pure instructions: opcode family to a resolver of its modifiers.

A resolver looks at one instruction's modifiers and returns an `Operation`: a NumPy function, the
types that it takes its sources in and the types of its results. Instructions that touch memory,
other threads or the program counter are not here (`translate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twinstep.replay.dtypes import NUMPY, Array
from twinstep.replay.errors import UnknownInstruction


@dataclass(frozen=True)
class Operation:
    """What one instruction computes.

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
    """

    function: Callable[..., Array | tuple[Array, ...]]
    sources: tuple[str, ...]
    results: tuple[str, ...]
    canonical: bool = False
    charge: str = ""
    first: Callable[..., Array] | None = None
    plain: np.ufunc | None = None


Resolver = Callable[[tuple[str, ...], int], Operation]
RESOLVERS: dict[str, Resolver] = {}


class Unresolved(Exception):
    """Raised by a resolver for modifiers it does not know; becomes `UnknownInstruction`."""


def opcode(*names: str) -> Callable[[Resolver], Resolver]:
    """Register a resolver for opcode families (the part before the first dot)."""

    def register(resolver: Resolver) -> Resolver:
        for name in names:
            RESOLVERS[name] = resolver
        return resolver

    return register


@lru_cache(4096)
def resolve(opcode_text: str, source_count: int) -> Operation:
    """The operation of an opcode with its modifiers.

    Args:
        opcode_text: For instance "add.rn.f32".
        source_count: Number of source operands.

    Raises:
        UnknownInstruction: if the family or a modifier is unknown.
    """
    parts = tuple(opcode_text.split("."))
    resolver = RESOLVERS.get(parts[0])
    if resolver is None:
        raise UnknownInstruction(f"Instruction {opcode_text} is unknown to replay.")
    try:
        return resolver(parts, source_count)
    except (Unresolved, KeyError) as cause:
        raise UnknownInstruction(
            f"Instruction {opcode_text} is unknown to replay (modifier {cause})."
        ) from None


def only(parts: tuple[str, ...], *allowed: str) -> tuple[str, ...]:
    """The modifiers between family and type, each of which must be allowed."""
    for part in parts[1:]:
        if part not in allowed and part not in NUMPY:
            raise Unresolved(part)
    return parts[1:]
