"""A kernel's own process from the judge's side: started, asked, limited, named when it dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws.plan import Call
from twinstep.parity.records.errors import (
    CannotJudge,
    CannotRun,
    JudgeFault,
    KernelDied,
    UsageError,
)
from twinstep.parity.registry.engines import Engine
from twinstep.parity.registry.kernels import Kernel
from twinstep.parity.runner.calls.host import Declared, serve
from twinstep.parity.runner.calls.invoke import SECONDS, Spent
from twinstep.parity.runner.calls.made import Made
from twinstep.parity.runner.calls.messages import packed, unpacked
from twinstep.parity.runner.calls.places import is_library
from twinstep.parity.runner.calls.processes import descendants, kill_session
from twinstep.parity.runner.fork_server import fresh_processes
from twinstep.parity.sequences.contracts import Place
from twinstep.parity.sequences.drive import Sides
from twinstep.parity.sequences.observe import Observation
from twinstep.parity.sequences.registry import Twin
from twinstep.parity.sequences.world import Act

CPU = torch.device("cpu")
TICK = 0.05
# The process's own limit comes first; this is for one that swallows it or never reaches Python.
GRACE = 3.0
LOAD_SECONDS = 60.0
MEMORY_SHARE = 0.6
PROCESSES = 100
PRINTED = 1 << 24
SHOWN = 2_000


ENDINGS: Mapping[str, type[Exception]] = {
    "cannot run": CannotRun,
    "cannot judge": CannotJudge,
    "usage": UsageError,
    "fault": JudgeFault,
}


@dataclass
class Output:
    """What a process prints: its beginning and its end, and how much it is."""

    first: bytes = b""
    last: bytes = b""
    size: int = 0

    def add(self, data: bytes) -> None:
        """Take more of it."""
        self.size += len(data)
        room = SHOWN - len(self.first)
        self.first += data[:room]
        self.last = (self.last + data[max(room, 0) :])[-SHOWN:]

    def text(self) -> str:
        """What is kept of it."""
        left_out = self.size - len(self.first) - len(self.last)
        middle = f"\n... {left_out} bytes more ...\n".encode() if left_out else b""
        return (self.first + middle + self.last).decode(errors="replace")


@dataclass(frozen=True)
class _Live:
    """A running process, its number, and the ends of its pipes."""

    process: BaseProcess
    number: int
    judge: Connection
    prints: Connection


@dataclass
class Subject:
    """A process that has loaded a user's kernels: started when asked, and again after a death.

    Attributes:
        file: the user's file; None for functions of this process, which is then forked.
        functions: kernels by name, where there is no file.
        output: what the kernels have printed since it was last taken.
        generation: number of starts; a memory is lost with the process that it was in.
    """

    file: str | None = None
    functions: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    output: Output = field(default_factory=Output)
    generation: int = 0
    _live: _Live | None = None
    _dropped: list[int] = field(default_factory=list)

    def load(self) -> Declared:
        """What the file registers.

        Raises:
            UsageError: it cannot be imported, or the import does not end.
        """
        self.close()
        return self._started()[1]

    def ask(self, kind: str, *arguments: object, seconds: float) -> Any:
        """The reply to a request.

        Args:
            kind: of the request, see `host.serve`.
            arguments: of the request.
            seconds: of work that it may take.

        Raises:
            KernelDied: there is none.
            CannotRun: the kernel cannot be run here.
            CannotJudge: the call cannot be made in the way that was asked for.
            JudgeFault: the error is the judge's own.
        """
        live = self._live or self._started()[0]
        return self._reply(live, kind, arguments, seconds)

    def drop(self, number: int, generation: int) -> None:
        """Forget a memory with the next request."""
        if generation == self.generation:
            self._dropped.append(number)

    def dropped(self) -> tuple[int, ...]:
        """Numbers of memories to be forgotten, once."""
        numbers, self._dropped = tuple(self._dropped), []
        return numbers

    def printed(self) -> str:
        """What the kernels have printed since the last time."""
        while self._live is not None and self._drain(self._live):
            pass
        text, self.output = self.output.text(), Output()
        return text

    def close(self) -> None:
        """End the process and everything that it has started."""
        live, self._live = self._live, None
        if live is not None:
            kill_session(live.number)
            live.process.join()
            live.judge.close()
            live.prints.close()

    def _started(self) -> tuple[_Live, Declared]:
        context = self._context()
        judge, theirs = multiprocessing.Pipe()
        prints, printed = multiprocessing.Pipe(duplex=False)
        arguments = (theirs, printed, self.file, {} if self.file else dict(self.functions))
        with warnings.catch_warnings():
            # The fork has one thread and needs no lock of another: torch is told to start none.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = context.Process(target=serve, args=arguments)
            process.start()
        theirs.close()
        printed.close()
        self._live = live = _Live(process, process.pid, judge, prints)
        self.generation += 1
        self._dropped = []
        # At the end of this process it would otherwise be waited for.
        Finalize(self, kill_session, (live.number,), exitpriority=10)
        try:
            return live, self._reply(live, "load", (), LOAD_SECONDS)
        except KernelDied as death:
            raise UsageError(f"{self.file} cannot be imported: it {death}") from None

    def _context(self) -> Any:
        """Source of the process.

        A worker is a fork of a server already: it has one thread and can be forked again at once,
        where another server would import everything anew.
        """
        worker = multiprocessing.parent_process() is not None
        if not self.file or (worker and not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return multiprocessing.get_context("fork")
        return fresh_processes()

    def _reply(self, live: _Live, kind: str, arguments: object, seconds: float) -> Any:
        watch = Watch(live.number, seconds)
        try:
            live.judge.send_bytes(packed((kind, arguments)))
            while not live.judge.poll(0.0 if self._drain(live) else TICK):
                watch.look(self.output)
            ending, value = unpacked(live.judge.recv_bytes())
        except (EOFError, OSError):
            raise self._ended(live, None) from None
        except UnpicklingError as error:
            raise self._ended(live, KernelDied("exit", f"forges a reply: {error}")) from None
        except KernelDied as death:
            raise self._ended(live, death) from None
        if ending != "done":
            raise ENDINGS[ending](value)
        return value

    def _drain(self, live: _Live) -> bool:
        """Take what has been printed; false if there is nothing at the moment."""
        if not live.prints.poll(0.0):
            return False
        with contextlib.suppress(OSError):
            data = os.read(live.prints.fileno(), 1 << 16)
            self.output.add(data)
            return bool(data)
        return False

    def _ended(self, live: _Live, death: KernelDied | None) -> KernelDied:
        """The process's end, with the line of the user's code where it is known."""
        if death is not None and death.kind == "hang":
            with contextlib.suppress(OSError):
                os.kill(live.number, signal.SIGUSR1)
            time.sleep(4 * TICK)
        else:
            live.process.join(1.0)
        while self._drain(live) and self.output.size < 2 * PRINTED:
            pass
        place, code = traced(self.output), live.process.exitcode
        self.close()
        if death is not None:
            return KernelDied(death.kind, f"{death}{place}")
        if code is not None and code < 0:
            return KernelDied(
                "signal", f"crashes its process with {signal.Signals(-code).name}{place}"
            )
        return KernelDied("exit", f"ends its process with exit code {code}")


def traced(output: Output) -> str:
    """The innermost line of the user's in what `faulthandler` has printed, in brackets."""
    lines = [line.strip() for line in output.text().splitlines()]
    frames = [line.split('"') for line in lines if line.startswith('File "')]
    known = [(parts[1], parts[2].partition("line ")[2].partition(" ")[0]) for parts in frames]
    users = [place for place in known if not is_library(place[0])]
    return f" [{users[0][0]}:{users[0][1]}]" if users else ""


@dataclass
class Watch:
    """Limits of one request: time, memory, processes, and what is printed.

    Attributes:
        process: its number.
        seconds: of work that it may take.
    """

    process: int
    seconds: float

    def __post_init__(self) -> None:
        self._began = Spent.by(self.process)
        self._looked = self._began.clock
        self._room = MEMORY_SHARE * available()

    def look(self, output: Output) -> None:
        """Compare with the limits, at most every `TICK` seconds.

        Raises:
            KernelDied: one is exceeded; the process is still there.
        """
        now = time.monotonic()
        if output.size > PRINTED:
            raise KernelDied("output", f"prints without end: {output.size >> 20} MiB")
        if now - self._looked < TICK:
            return
        self._looked = now
        spent = Spent.by(self.process).since(self._began).too_much(self.seconds + GRACE)
        if spent:
            raise KernelDied("hang", f"hangs: no return after {spent}")
        size = resident(self.process)
        if size > self._room:
            raise KernelDied("memory", f"takes {size / 2**30:.1f} GiB of memory")
        running = len(descendants(self.process))
        if running > PROCESSES:
            raise KernelDied("processes", f"starts processes without end: {running} are running")


def resident(process: int) -> int:
    """Bytes of memory that a process has of its own."""
    with contextlib.suppress(OSError):
        rows = Path(f"/proc/{process}/statm").read_text().split()
        return (int(rows[1]) - int(rows[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0


def available() -> int:
    """Bytes of memory that this machine could still give."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


def forked(functions: Mapping[str, Callable[..., object]]) -> Subject | None:
    """A fork of this process, for kernels and classes that no file registers.

    None where CUDA is in use here: a fork has no device, so the calls are made in this process.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return Subject(functions=functions)


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
        memory = GuardedMemory.of(call.case, CPU)
        known = -1 if reuse is None else reuse.number
        request = (self.kernel.name, self.engine.name, call, known, self.seconds)
        # A large call on a GPU gets more time from its maker.
        limit = max(self.seconds, 60.0) if call.end else self.seconds
        try:
            number, rows = self.subject.ask("call", *request, self.subject.dropped(), seconds=limit)
        except KernelDied as death:
            return Made(memory=memory, after=memory.before, failure=str(death), fatal=death.kind)
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
    """

    subject: Subject
    seconds: float
    built: bool = False
    outcome: dict[str, object] = field(default_factory=dict)
    says: str = ""

    @classmethod
    def maker(cls, subject: Subject, engine: Engine, seconds: float) -> Sides:
        """A function that starts a side anew."""

        def start(twin: Twin, dtype: str, device: str) -> RemoteSide:
            subject.ask("drive", twin.name, engine.name, dtype, device, seconds=seconds)
            return cls(subject, seconds)

        return start

    def carry_out(self, act: Act) -> None:
        """Carry out one action."""
        reply = self.subject.ask("act", act, seconds=self.seconds)
        self.built, self.outcome, self.says = reply

    def seen(self, twin: Twin) -> Observation:
        """All that can be seen now."""
        found: Observation = self.subject.ask("seen", seconds=self.seconds)
        return found

    def read(self, place: Place) -> Tensor:
        """The tensor at a place."""
        found = self.subject.ask("read", place, seconds=self.seconds)
        if found is None:
            raise KeyError(str(place))
        return cast(Tensor, found)

    def write(self, place: Place, value: Tensor) -> None:
        """Overwrite the tensor at a place."""
        self.subject.ask("write", place, value, seconds=self.seconds)
