"""Calls made in this process."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.formula import lifted
from twinstep.parity.expected.instruction_error import (
    CPU,
    IEEE,
    UNKNOWN,
    InstructionError,
    instruction_error_of,
)
from twinstep.parity.laws.call import Call
from twinstep.parity.registry.engines import Engine
from twinstep.parity.runner.calls.allocations import allocations
from twinstep.parity.runner.calls.execute_call import execute_call
from twinstep.parity.runner.calls.host_sync import numbers_read, watched
from twinstep.parity.runner.calls.invoke import SECONDS
from twinstep.parity.runner.calls.made import Made, work_of
from twinstep.parity.runner.calls.process_state import (
    NewTensors,
    ProcessState,
    kept_gradients,
    left_behind,
    turned,
)

if TYPE_CHECKING:
    from twinstep.replay.launch.record import Launch
    from twinstep.replay.shadow64.lift import Lift, Wide

NOT_WATCHED: contextlib.nullcontext[tuple[str, ...]] = contextlib.nullcontext(())


@dataclass(frozen=True)
class LocalCaller:
    """Maker of calls in this process.

    Attributes:
        function: the kernel.
        engine: where it runs.
        seconds: limit of one call.
        guard: compare the process's state before and after every call, not only where the law asks.
    """

    function: Callable[..., object]
    engine: Engine
    seconds: float = SECONDS
    guard: bool = False

    def make(self, call: Call, reuse: GuardedMemory | None) -> Made:
        """Make a call; see `Caller.make`."""
        if reuse is None:
            memory = GuardedMemory.of(call.case, self.engine.device)
        else:
            memory = reuse.renewed(call.case, call.moved)
        if not call.guarded:  # what a call keeps is told by tensors that are made for it
            memory.hold()
        with turned(_narrow(call.case)) if call.turned else contextlib.nullcontext():
            return self._made(call, memory)

    def _made(self, call: Call, memory: GuardedMemory) -> Made:
        state = ProcessState() if self.guard or call.guarded else None
        new = NewTensors() if call.guarded else None
        with (
            recorded_launches(self.engine) as log,
            watched(memory.block) if call.watched else NOT_WATCHED as reads,
            lifted(memory, call.lifted) as lift,
            numbers_read(_floats(memory)) if call.lifted else NOT_WATCHED as numbers,
            allocations(call.garbage, memory, self.engine) as allocated,
        ):
            seconds = work_of(call, self.seconds)
            ended = execute_call(call, self.function, memory, self.engine, seconds, allocated)
        if new is not None:
            memory.made += new.found()
        keeps = left_behind(memory.made) if call.guarded else {}
        changed = tuple(state.changes()) if state is not None else ()
        if new is not None:
            changed += tuple(kept_gradients(memory, new.cyclic))
        return Made(
            memory=memory,
            after=memory.after(),
            failure=ended.failure,
            fatal=ended.fatal,
            caught=ended.caught,
            launches=ended.launches,
            reads=tuple(reads),
            error=instruction_error_on(self.engine, log),
            approximate=tuple(_approximate(log)),
            wide={} if lift is None or ended.failure else _wide(lift, memory),
            foreign=lift is not None and (lift.foreign or bool(numbers)),
            changed=(*memory.changed, *changed),
            keeps=keeps,
            remark=tuning_remark(log) + (allocated.remark if allocated else ""),
        )


def _narrow(case: Case) -> torch.dtype:
    """The 16-bit dtype of a case, bf16 where there is none."""
    dtypes = {tensor.dtype for tensors in case.lists.values() for tensor in tensors}
    return torch.float16 if torch.float16 in dtypes else torch.bfloat16


def _floats(memory: GuardedMemory) -> list[Tensor]:
    found = [span.of(memory.block) for span in memory.spans if not span.control]
    return [tensor for tensor in found if tensor.is_floating_point()]


def _wide(lift: Lift, memory: GuardedMemory) -> dict[tuple[str, int], Wide]:
    return {
        (span.name, span.index): lift.read(span.of(memory.block))
        for span in memory.spans
        if span.name in memory.case.operation.writes
        and span.value.is_floating_point()
        and span.value.numel()
    }


@contextlib.contextmanager
def recorded_launches(engine: Engine) -> Iterator[list[Launch]]:
    """The launches made inside the context, where the engine records them."""
    if engine.name != "replay":
        yield []
        return
    from twinstep.replay import launches

    with launches() as log:
        yield log


def instruction_error_on(engine: Engine, log: list[Launch]) -> InstructionError:
    """Instruction error that the bounds of a call must allow for on this engine."""
    if engine.name == "replay":
        return instruction_error_of(log) if log else CPU
    return {"cpu": CPU, "interpret": IEEE}.get(engine.name, UNKNOWN)


def tuning_remark(log: list[Launch]) -> str:
    """Remark on launches that an autotuner made on the arguments of the call; empty without any."""
    tuned = Counter(launch.kernel for launch in log if launch.tuning)
    counts = ", ".join(f"{name} {count} times" for name, count in tuned.items())
    return f"; the tuner ran {counts} on these arguments: give restore_value" if tuned else ""


def _approximate(log: list[Launch]) -> Iterator[str]:
    """Replay rounds approximate instructions correctly, and the hardware need not."""
    for launch in log:
        for name, place in launch.approximated_at.items():
            yield f"{launch.kernel} runs {name} at {place}"
