"""A kernel's own process from the judge's side: started, asked, limited, named when it dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pickle import UnpicklingError
from typing import Any

import torch

from twinstep.parity.records.errors import (
    CannotJudge,
    CannotRun,
    JudgeFault,
    KernelDied,
    UsageError,
)
from twinstep.parity.runner.calls.host import Declared, serve
from twinstep.parity.runner.calls.limits import PRINTED, TICK, Output, Watch, traced
from twinstep.parity.runner.calls.messages import packed, unpacked
from twinstep.parity.runner.calls.processes import kill_session
from twinstep.parity.runner.fork_server import fresh_processes

LOAD_SECONDS = 60.0


ENDINGS: Mapping[str, type[Exception]] = {
    "cannot run": CannotRun,
    "cannot judge": CannotJudge,
    "usage": UsageError,
    "fault": JudgeFault,
}


@dataclass(frozen=True)
class _Live:
    """A running process, its number, the ends of its pipes, and what kills it at our own end."""

    process: BaseProcess
    number: int
    judge: Connection
    prints: Connection
    finalizer: Finalize


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
        """Registrations of the file.

        Raises:
            UsageError: it cannot be imported, or the import does not end.
        """
        self.close()
        return self._started()[1]

    def ask(self, kind: str, *arguments: object, seconds: float) -> object:
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
        """Output of the kernels since the last time."""
        while self._live is not None and self._drain(self._live):
            pass
        text, self.output = self.output.text(), Output()
        return text

    def close(self) -> None:
        """End the process and everything that it has started."""
        live, self._live = self._live, None
        if live is not None:
            # Later the number may be another process's.
            live.finalizer.cancel()
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
        # At the end of this process it would otherwise be waited for.
        finalizer = Finalize(self, kill_session, (process.pid,), exitpriority=10)
        self._live = live = _Live(process, process.pid, judge, prints, finalizer)
        self.generation += 1
        self._dropped = []
        try:
            return live, self._reply(live, "load", (), LOAD_SECONDS)
        except KernelDied as death:
            raise UsageError(f"{self.file} cannot be imported: it {death}") from None

    def _context(self) -> Any:
        """Source of the process: functions of this one are there only in a fork."""
        return fresh_processes() if self.file else multiprocessing.get_context("fork")

    def _reply(self, live: _Live, kind: str, arguments: object, seconds: float) -> Any:
        watch = Watch(live.number, seconds)
        try:
            live.judge.send_bytes(packed((kind, arguments)))
            while not live.judge.poll(0.0 if (printing := self._drain(live)) else TICK):
                watch.look(self.output, printing)
            ending, value = unpacked(live.judge.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended(live, None, type(error).__name__) from None
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

    def _ended(self, live: _Live, death: KernelDied | None, how: str = "") -> KernelDied:
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
        if code is None:
            return KernelDied("exit", f"leaves its process without a connection ({how})")
        return KernelDied("exit", f"ends its process with exit code {code}")


def forked(functions: Mapping[str, Callable[..., object]]) -> Subject | None:
    """A fork of this process, for kernels and classes that no file registers.

    None where CUDA is in use here: a fork has no device, so the calls are made in this process.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return Subject(functions=functions)
