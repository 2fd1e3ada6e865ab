"""Calls and actions made in a kernel's own process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws.call import Call
from twinstep.parity.records.errors import KernelDied
from twinstep.parity.registry.engines import Engine
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.calls.invoke import SECONDS
from twinstep.parity.runner.calls.made import Made, work_of
from twinstep.parity.runner.calls.subject import Subject
from twinstep.parity.sequences.contracts import Place
from twinstep.parity.sequences.observe import Observation
from twinstep.parity.sequences.over_ranks.drive import PATIENCE, WorldRun
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.world import Act

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RemoteCaller:
    """Maker of a kernel's calls in its own process.

    Attributes:
        kernel: by its name.
        engine: where it runs.
        subject: the process.
        seconds: limit of one call.
    """

    kernel: Kernel
    engine: Engine
    subject: Subject
    seconds: float = SECONDS

    def make(self, call: Call, reuse: GuardedMemory | None) -> Made:
        """Make a call; see `Caller.make`."""
        memory = GuardedMemory.of(call.case, CPU, call.moved)
        known = -1 if reuse is None else reuse.number
        request = (self.kernel.name, self.engine.name, call, known, self.seconds)
        # A large call on a GPU gets more time from its maker.
        limit = max(self.seconds, 60.0) if call.end else work_of(call, self.seconds)
        try:
            reply = self.subject.ask("call", *request, self.subject.dropped(), seconds=limit)
        except KernelDied as death:
            return Made(memory=memory, after=memory.before, failure=str(death), fatal=death.kind)
        number, rows = cast(tuple[int, dict[str, Any]], reply)
        memory.number = number
        weakref.finalize(memory, self.subject.drop, number, self.subject.generation)
        made = Made(memory=memory, **rows)
        if made.fatal == "hang" or any(says.startswith("replaces") for says in made.changed):
            self.subject.close()
        return made


@dataclass
class RemoteSide:
    """A class under judgement, driven in its own process; see `Driven`.

    Attributes:
        subject: the process.
        seconds: limit of one action.
        built: whether there is a world.
        outcome: of the last action.
        says: the last error, with its message.
        launches: how many have run to their end on replay.
    """

    subject: Subject
    seconds: float
    built: bool = False
    outcome: dict[str, object] = field(default_factory=dict)
    says: str = ""
    launches: int = 0

    def carry_out(self, act: Act) -> None:
        """Carry out one action."""
        reply = self.subject.ask("act", act, seconds=self.seconds)
        given = cast(tuple[bool, dict[str, object], str, int], reply)
        self.built, self.outcome, self.says, self.launches = given

    def seen(self, twin: Twin) -> Observation:
        """All that can be seen now."""
        return cast(Observation, self.subject.ask("seen", seconds=self.seconds))

    def read(self, place: Place) -> Tensor:
        """The tensor at a place."""
        found = self.subject.ask("read", place, seconds=self.seconds)
        if found is None:
            raise KeyError(str(place))
        return cast(Tensor, found)

    def write(self, place: Place, value: Tensor) -> None:
        """Overwrite the tensor at a place."""
        self.subject.ask("write", place, value, seconds=self.seconds)


@dataclass(frozen=True)
class RemoteSides:
    """Maker of sides in a class's own process.

    Attributes:
        subject: the process.
        engine: where the class runs.
        seconds: limit of one action.
    """

    subject: Subject
    engine: Engine
    seconds: float

    def __call__(self, twin: Twin, dtype: str, device: str) -> RemoteSide:
        """A side, begun anew."""
        given = (twin.name, self.engine.name, dtype, device)
        self.subject.ask("drive", *given, seconds=self.seconds)
        return RemoteSide(self.subject, self.seconds)

    def over_ranks(self, twin: Twin, dtype: str, device: str, acts: Sequence[Act]) -> WorldRun:
        """The actions carried out on all ranks of a world."""
        given = (twin.name, self.engine.name, dtype, device, tuple(acts))
        # A rank that comes no further is given up by the others before that.
        seconds = self.seconds + 2 * PATIENCE
        return cast(WorldRun, self.subject.ask("over ranks", *given, seconds=seconds))
