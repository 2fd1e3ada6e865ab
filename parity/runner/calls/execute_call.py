"""Make one call of a plan, in the way that the plan asks for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from twinstep.parity.cases.garbage import BYTES
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.large_index import places
from twinstep.parity.registry.engines import Engine, as_on
from twinstep.parity.runner.calls import large_tensors
from twinstep.parity.runner.calls.allocations import Allocations
from twinstep.parity.runner.calls.cuda_graph import call_captured
from twinstep.parity.runner.calls.invoke import Ended, invoke


def execute_call(
    call: Call,
    function: Callable[..., object],
    memory: GuardedMemory,
    engine: Engine,
    seconds: float,
    made: Allocations | None = None,
) -> Ended:
    """Call a kernel.

    Args:
        call: how it is made.
        function: the kernel.
        memory: where its arguments lie, filled.
        engine: where it runs.
        seconds: limit of the call.
        made: what follows the memory that the call allocates, if something does.

    Raises:
        CannotJudge: there is not enough memory or time for a large call.
        CannotRun: see `invoke`.
    """
    function = as_on(engine, function)
    _recompile_without_limit()
    if call.captured:
        return call_captured(function, memory, seconds)
    if not call.end:
        with _on_replay(engine, memory, check_races=call.races, made=made, schedule=call.schedule):
            return invoke(function, memory, seconds)
    ended = Ended()
    if not memory.ends:
        grown = large_tensors.LargeTensors(call.case, engine)
        with _on_replay(engine, grown, ends=grown):
            ended = large_tensors.call_large(function, grown, engine)
        if ended.failure:
            return ended
        memory.ends = {which: grown.end(memory, which) for which in places(call.case)}
    memory.block.copy_(memory.ends[call.end])
    return ended


def _recompile_without_limit() -> None:
    """Let torch.compile form a version for each shape, dtype and switch that the laws meet.

    Beyond eight it would run the kernel as it is written, with other bits than those before.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.recompile_limit = config.accumulated_recompile_limit = sys.maxsize


@contextlib.contextmanager
def _on_replay(
    engine: Engine,
    memory: GuardedMemory | large_tensors.LargeTensors,
    *,
    check_races: bool = False,
    ends: large_tensors.LargeTensors | None = None,
    made: Allocations | None = None,
    schedule: str = "",
) -> Iterator[None]:
    """Settings of replay, and every tensor of the call within reach: a table may hold its address.

    Args:
        engine: where the call runs; nothing is changed on others.
        memory: holds the tensors.
        check_races: see `replay.options`.
        ends: run no blocks but those of the places that are looked at in large tensors.
        made: see `execute_call`.
        schedule: see `Call`.
    """
    if engine.name != "replay":
        yield
        return
    from twinstep.replay import allow, options
    from twinstep.replay.machine.watchdog import PATIENCE

    with (
        allow(**memory.named()),
        options(
            check_races=check_races,
            shake_sums=check_races and not schedule,
            only_ends=large_tensors.ENDS if ends else None,
            and_middle=ends is not None,
            and_parts=ends.places.parts() if ends else (),
            order={"backwards": "backwards", "permuted": "permuted"}.get(schedule, "natural"),
            together=3 if schedule == "permuted" else int(bool(schedule)),
            patience=2.0 if schedule else PATIENCE,
            strict_provenance=True,
            uninitialised=made.unwritten if made else None,
            garbage=BYTES[made.garbage] if made else 0xCD,
        ),
    ):
        yield
