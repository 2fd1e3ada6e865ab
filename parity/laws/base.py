"""What a law is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parity.case import Case
from parity.operation import Operation
from parity.plan import Plan

# Every regime has its turn, and the first cases see the most; a mixture holds all finite ones.
TURNS = (
    "mixture",
    "planted",
    "bits",
    "cancelling",
    "mixture",
    "tiny_root",
    "ties",
    "extreme",
    "ordinary",
    "planted",
    "subnormal",
    "zeros",
)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What the generator draws for a law.

    Attributes:
        regimes: taken in turn, one for each case.
        sizes: `usual` (several tensors around boundaries), `small` (a few dozen elements), `pairs`
            (usual, with tensors of equal size).
        one_step: all tensors have completed the same number of steps.
        guards: bytes to fill the room around the tensors with.
        full: make every list at least one element long.
    """

    regimes: tuple[str, ...] = TURNS
    sizes: str = "usual"
    one_step: bool = False
    guards: tuple[int, ...] = (0x5A, 0xFF)
    full: bool = False


def as_drawn(case: Case) -> Iterable[Case]:
    """The case itself and no other."""
    return [case]


def everywhere(operation: Operation, combination: str) -> str:
    """The law applies to every dtype combination."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Law:
    """A named property that kernels must have.

    Attributes:
        name: the table's column.
        says: the property in one line.
        share: number of drawn cases relative to `--examples`.
        draw: what is drawn.
        vary: the cases that are judged for one drawn case; each can fail and shrink alone.
        plan: calls and checks for one case and the kernel's arithmetic.
        idle: why the law says nothing about a dtype combination; empty where it does.
    """

    name: str
    says: str
    share: float = 1.0
    draw: Draw = Draw()
    vary: Callable[[Case], Iterable[Case]] = as_drawn
    plan: Callable[[Case, str], Plan]
    idle: Callable[[Operation, str], str] = everywhere
