"""A kernel's own process: loads the user's file, makes the calls that the judge asks for.

It runs in a session of its own, holds nothing of what the judge expects, and ends when the judge
closes the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws.call import Call
from twinstep.parity.operations.table import HOUSE
from twinstep.parity.records.errors import CannotJudge, CannotRun, UsageError
from twinstep.parity.registry.engines import (
    Engine,
    claimed_engines,
    engine_named,
    running,
    uses_triton,
)
from twinstep.parity.registry.kernels import Elsewhere, Kernel, kernels
from twinstep.parity.runner.calls.invoke import COUNTS_WAITING, unable
from twinstep.parity.runner.calls.local import LocalCaller
from twinstep.parity.runner.calls.made import Made
from twinstep.parity.runner.calls.messages import packed, unpacked
from twinstep.parity.runner.calls.process_state import Functions, ProcessState
from twinstep.parity.runner.interpreter import remarks
from twinstep.parity.runner.load_file import import_file, source_of
from twinstep.parity.sequences.contracts import Place
from twinstep.parity.sequences.drive import Side, on_all_ranks
from twinstep.parity.sequences.judge import launches_triton
from twinstep.parity.sequences.observe import Leaf, Observation
from twinstep.parity.sequences.over_ranks.drive import WorldRun
from twinstep.parity.sequences.registry import ORDINARY, RULES, Twin, rules_of, twins
from twinstep.parity.sequences.world import Act

PR_SET_CHILD_SUBREAPER = 36
OUTPUTS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Registrations of a file, for a process that has not loaded it.

    Attributes:
        kernels: with `Elsewhere` in the place of their functions.
        own: whether the file brings operations, reference classes or rules of its own, which the
            judge must load too.
        twins: with a stand-in for the class.
        remarks: what is likely to go wrong, one sentence each.
    """

    kernels: tuple[Kernel, ...] = ()
    twins: tuple[Twin, ...] = ()
    own: bool = False
    remarks: tuple[str, ...] = ()


@dataclass
class _Host:
    """State of the process: what is loaded, and the memories that calls may work in again."""

    functions: dict[str, Callable[..., object]]
    file: str | None
    clean: Functions = field(default_factory=Functions)
    memories: dict[int, GuardedMemory] = field(default_factory=dict)
    count: int = 0
    twin: Twin | None = None
    side: Side | None = None
    engine: Engine = field(default_factory=lambda: engine_named("cpu"))
    changed: str = ""

    def load(self) -> Declared:
        """Import the file; what it registers."""
        if self.file is None:
            return Declared()
        found = import_file(self.file)
        replaced = self.clean.replaced()
        if replaced:
            raise UsageError(
                f"{self.file} replaces {replaced[0]} when it is imported; "
                "a file must leave the judge, torch and Python as they are"
            )
        known = [row for row in kernels() if row.name not in self.functions]
        self.functions |= {row.name: row.function for row in known}
        house = {row.name for row in HOUSE}
        own = any(row.operation.name not in house for row in known)
        own |= any(not _known(row) for row in twins())
        source = source_of(self.file)
        found += filter(None, (row.rules.remark(row.subject) for row in twins()))
        stubs = [
            replace(row, function=_stub(row), engines=claimed_engines(row), source=source)
            for row in known
        ]
        if own:
            return Declared(own=True, remarks=tuple(found))
        classes = tuple(
            replace(row, triton=launches_triton(row.subject), source=source) for row in twins()
        )
        return Declared(kernels=tuple(stubs), twins=classes, remarks=tuple(found))

    def call(
        self,
        name: str,
        engine: str,
        call: Call,
        reuse: int,
        seconds: float,
        dropped: tuple[int, ...],
    ) -> tuple[int, Made]:
        """Make a call; the number of its memory, and what it left."""
        for number in dropped:
            self.memories.pop(number, None)
        place = engine_named(engine)
        caller = LocalCaller(self.functions[name], place, seconds, guard=True)
        with running(place):
            made = caller.make(call, self.memories.get(reuse))
        if call.guarded:
            replaced = [f"replaces {name}" for name in self.clean.replaced()]
            made = replace(made, changed=(*made.changed, *replaced))
        self.count += 1
        self.memories[self.count] = made.memory
        return self.count, made

    def drive(self, name: str, engine: str, dtype: str, device: str) -> None:
        """Begin to drive a class anew."""
        twin = next(row for row in twins() if row.name == name)
        self.twin, self.engine = twin, engine_named(engine)
        self.side = Side(twin.subject, twin.rules, dtype, device)
        self.changed = ""

    def act(self, act: Act) -> tuple[bool, dict[str, object], str, int]:
        """Carry out an action; whether there is a world, kinds of outcome, message, launches."""
        side = cast(Side, self.side)
        state = ProcessState()
        with running(self.engine):
            side.carry_out(act)
        self.changed = next(state.changes(), "")
        if "raised" in side.outcome and side.error is not None:
            reason = unable(side.error)
            if reason:
                raise CannotRun(reason)
        return side.built, dict.fromkeys(side.outcome), side.says, side.launches

    def over_ranks(
        self, name: str, engine: str, dtype: str, device: str, acts: tuple[Act, ...]
    ) -> WorldRun:
        """Carry out actions on all ranks of a world."""
        twin = next(row for row in twins() if row.name == name).over_ranks()
        assert twin is not None
        state = ProcessState()
        with running(engine_named(engine)):
            found = on_all_ranks(twin.subject, twin, dtype, device, acts)
        for reason in filter(None, map(unable, found.errors)):
            raise CannotRun(reason)
        for rows in found.ranks:
            for changed in list(state.changes())[:1]:
                last = rows.pop()
                leaves = {**last.leaves, "process": Leaf(changed)}
                rows.append(replace(last, leaves=leaves))
        return replace(found, errors=[])

    def seen(self) -> Observation:
        """All that can be seen of the class now."""
        found = cast(Side, self.side).seen(cast(Twin, self.twin))
        return {**found, "process": Leaf(self.changed)} if self.changed else found

    def read(self, place: Place) -> Tensor | None:
        """The tensor at a place, if there is one."""
        try:
            return cast(Side, self.side).read(place)
        except (KeyError, AttributeError, IndexError):
            return None

    def write(self, place: Place, value: Tensor) -> None:
        """Overwrite the tensor at a place."""
        cast(Side, self.side).write(place, value)

    def interpreted(self, names: tuple[str, ...]) -> list[str]:
        """Remarks on verdicts reached in Triton's interpreter."""
        return remarks([row for row in kernels() if row.name in names])


def _known(twin: Twin) -> bool:
    """True if the judge has its reference and its rules."""
    ours = twin.reference in RULES or twin.reference in ORDINARY
    return ours and type(rules_of(twin.reference)) is type(twin.rules)


def _stub(kernel: Kernel) -> Elsewhere:
    function = kernel.function
    name = getattr(function, "__name__", type(function).__name__)
    return Elsewhere(name, uses_triton(function))


def serve(
    judge: Connection,
    output: Connection,
    file: str | None,
    functions: Mapping[str, Callable[..., object]],
) -> None:
    """Answer requests until the judge closes the connection.

    Args:
        judge: requests come and replies go here.
        output: gets what the kernel prints.
        file: the user's file, loaded on request; None where the functions are here already.
        functions: kernels by name, where this process was forked with them.
    """
    _settle(output)
    own, host = os.getpid(), _Host(dict(functions), file)
    handlers: dict[str, Callable[..., object]] = {
        "load": host.load,
        "call": host.call,
        "drive": host.drive,
        "act": host.act,
        "over ranks": host.over_ranks,
        "seen": host.seen,
        "read": host.read,
        "write": host.write,
        "interpreted": host.interpreted,
    }
    while True:
        try:
            kind, arguments = unpacked(judge.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        reply: tuple[str, object]
        try:
            reply = "done", handlers[kind](*arguments)
        except CannotRun as error:
            reply = "cannot run", str(error)
        except CannotJudge as error:
            reply = "cannot judge", str(error)
        except UsageError as error:
            reply = "usage", str(error)
        except Exception:
            reply = "fault", traceback.format_exc()
        if os.getpid() != own:
            # A fork by the kernel that has come back: one process answers.
            os._exit(1)
        with contextlib.suppress(OSError):
            judge.send_bytes(packed(_plain(reply)))
        # An observation holds memory, and an action may look whether it is free.
        del reply, arguments


def _plain(reply: tuple[str, object]) -> tuple[str, object]:
    """The reply without the memory, which stays here."""
    kind, value = reply
    if isinstance(value, tuple) and isinstance(value[1], Made):
        number, made = value
        rows = {name: getattr(made, name) for name in made.__dataclass_fields__ if name != "memory"}
        return kind, (number, rows)
    return reply


def _settle(output: Connection) -> None:
    """Cut this process off from the judge's terminal, and mark it as the first to be killed."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in OUTPUTS:
        os.dup2(output.fileno(), stream)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # A crash, or a hang that the judge asks about, prints where it is.
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    COUNTS_WAITING[0] = False
    gc.freeze()
