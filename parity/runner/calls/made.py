"""A call that was made, and the makers of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.instruction_error import UNKNOWN, InstructionError
from twinstep.parity.laws.call import Call

if TYPE_CHECKING:
    from twinstep.replay.shadow64.lift import Wide

# Elements up to which the limit of a call is the same.
USUAL = 2**18


@dataclass(frozen=True, kw_only=True)
class Made:
    """Results of one call; plain data but for its memory.

    Attributes:
        memory: where it worked, as it was laid out.
        after: the bytes it left, on the CPU.
        failure: what happened instead of a return of None; empty if nothing did.
        fatal: kind of a failure after which there is no use in going on: `exit`, `signal`, `hang`,
            `memory`, `processes`, `output`, `compile`; empty for any other.
        caught: see `Ended`.
        launches: see `Ended`.
        reads: device values that the host read meanwhile, if that was watched.
        error: what the instructions that ran may be off by.
        approximate: sentences on the approximate instructions that ran, with their place.
        wide: what the kernel's formula gives in float64, by argument and position, if it was
            lifted.
        foreign: whether that formula used numbers that the host had computed.
        changed: sentences on what is different in the process after the call.
        keeps: after a guarded call, the tensors that calls in this memory have made and not let go,
            their bytes, the process's threads and its processes, by name.
        remark: what may be the cause of wrong results; empty if nothing is known.
    """

    memory: GuardedMemory
    after: Tensor
    failure: str = ""
    fatal: str = ""
    caught: str = ""
    launches: int = 0
    reads: tuple[str, ...] = ()
    error: InstructionError = UNKNOWN
    approximate: tuple[str, ...] = ()
    wide: Mapping[tuple[str, int], Wide] = field(default_factory=dict)
    foreign: bool = False
    changed: tuple[str, ...] = ()
    keeps: Mapping[str, int] = field(default_factory=dict)
    remark: str = ""


def work_of(call: Call, seconds: float) -> float:
    """Seconds of work that a call may take, given those that one of few elements may."""
    return seconds * max(1.0, call.case.numel / USUAL)


class Caller(Protocol):
    """Maker of a kernel's calls, here or in another process."""

    def make(self, call: Call, reuse: GuardedMemory | None) -> Made:
        """Make a call.

        Args:
            call: how it is made, and its arguments.
            reuse: the memory of an earlier call to work in again; None for memory of its own.

        Raises:
            CannotJudge: the call cannot be made here in the way that the law asks for.
            CannotRun: the kernel cannot be run here at all.
        """
