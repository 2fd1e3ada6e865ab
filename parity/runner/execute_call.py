"""Make one call of a plan, in the way that the plan asks for."""

from __future__ import annotations

from collections.abc import Callable

from twinstep.parity.cases.guarded_memory import Arena
from twinstep.parity.laws.plan import Call
from twinstep.parity.registry.engines import Engine
from twinstep.parity.runner import large_tensors
from twinstep.parity.runner.cuda_graph import replayed
from twinstep.parity.runner.invoke import invoke


def execute_call(
    call: Call, function: Callable[..., object], arena: Arena, engine: Engine, seconds: float
) -> str:
    """Call a kernel; empty if it returned None, otherwise what happened instead.

    Args:
        call: says how.
        function: the kernel.
        arena: its memory, filled.
        engine: where it runs.
        seconds: limit of the call.

    Raises:
        CannotJudge: there is not enough memory or time for a large call.
    """
    if call.races:
        return _compared(function, arena, seconds)
    if call.captured:
        return replayed(function, arena, seconds)
    if not call.end:
        return invoke(function, arena, seconds)
    if arena.ends is None:
        grown = large_tensors.Large(call.case, engine)
        failure = large_tensors.called(function, grown, engine)
        if failure:
            return failure
        arena.ends = grown.end(arena, last=False), grown.end(arena, last=True)
    arena.block.copy_(arena.ends[call.end == "last"])
    return ""


def _compared(function: Callable[..., object], arena: Arena, seconds: float) -> str:
    """Call a kernel on replay while every access is compared with those before it."""
    from twinstep.replay import allow, options

    names = {
        span.name if span.control else f"{span.name}[{span.index}]": span.of(arena.block)
        for span in arena.spans
    }
    with allow(**names), options(check_races=True):
        return invoke(function, arena, seconds)
