"""Make one call of a plan, in the way that the plan asks for."""

from __future__ import annotations

from collections.abc import Callable

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws.plan import Call
from twinstep.parity.registry.engines import Engine
from twinstep.parity.runner.calls import large_tensors
from twinstep.parity.runner.calls.cuda_graph import call_captured
from twinstep.parity.runner.calls.invoke import Ended, invoke


def execute_call(
    call: Call,
    function: Callable[..., object],
    memory: GuardedMemory,
    engine: Engine,
    seconds: float,
) -> Ended:
    """Call a kernel.

    Args:
        call: how it is made.
        function: the kernel.
        memory: where its arguments lie, filled.
        engine: where it runs.
        seconds: limit of the call.

    Raises:
        CannotJudge: there is not enough memory or time for a large call.
        CannotRun: see `invoke`.
    """
    if call.races:
        return _compared(function, memory, seconds)
    if call.captured:
        return call_captured(function, memory, seconds)
    if not call.end:
        return invoke(function, memory, seconds)
    if memory.ends is None:
        grown = large_tensors.LargeTensors(call.case, engine)
        ended = large_tensors.call_large(function, grown, engine)
        if ended.failure:
            return ended
        memory.ends = grown.end(memory, last=False), grown.end(memory, last=True)
    memory.block.copy_(memory.ends[call.end == "last"])
    return Ended()


def _compared(function: Callable[..., object], memory: GuardedMemory, seconds: float) -> Ended:
    """Call a kernel on replay while every access is compared with those before it."""
    from twinstep.replay import allow, options

    names = {
        span.name if span.control else f"{span.name}[{span.index}]": span.of(memory.block)
        for span in memory.spans
    }
    with allow(**names), options(check_races=True):
        return invoke(function, memory, seconds)
