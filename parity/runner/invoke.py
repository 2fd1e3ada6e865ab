"""Call a kernel that may raise, hang, or return what it should not."""

from __future__ import annotations

import contextlib
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from twinstep.parity.records.errors import CannotJudge, JudgeFault, KernelTimeout

SECONDS = 20.0
PATIENCE = 10
UNSUPPORTED = ("UnknownInstruction", "UnsupportedTriton")
LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
_TOP = Path(__file__).resolve().parents[2]
INSIDE = (_TOP / "parity" / "cases", _TOP / "replay")
"""Code of ours that runs inside a call, apart from kernels and from what passes calls on."""


class Callee(Protocol):
    """The arguments of a call."""

    block: Tensor

    def call(self, kernel: Callable[..., object]) -> object:
        """Call the kernel with them."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `KernelTimeout` inside the block after that many seconds of the processor's time.

    Seconds by the clock would call a kernel hanging because the machine is busy with others; one
    that waits, for a lock or for its compiler, gets `PATIENCE` times as many by the clock. Works by
    SIGALRM, so only in the main thread and between Python instructions; elsewhere there is no
    limit.
    """
    alarms = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not alarms or seconds <= 0:
        yield
        return
    began, worked = time.monotonic(), time.thread_time()

    def ring(number: int, frame: FrameType | None) -> None:
        spent = ""
        if time.thread_time() - worked >= seconds:
            spent = f"{seconds:g} s of work"
        elif time.monotonic() - began >= PATIENCE * seconds:
            spent = f"{PATIENCE * seconds:g} s, most of them waiting"
        if spent:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KernelTimeout(f"no return after {spent}")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 8)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def invoke(function: Callable[..., object], memory: Callee, seconds: float = SECONDS) -> str:
    """Call a kernel on its memory; empty if it returned None, otherwise what happened instead.

    Raises:
        CannotJudge: replay does not implement what the kernel needs, or the judge asks too much.
        JudgeFault: the judge or replay itself went wrong.
    """
    try:
        with time_limit(seconds):
            returned = memory.call(function)
            if memory.block.is_cuda:
                torch.cuda.synchronize()
    except KernelTimeout as timeout:
        return f"hangs: {timeout}"
    except CannotJudge:
        raise
    except Exception as error:
        says = told(error)
        if type(error).__name__ in UNSUPPORTED:
            raise CannotJudge(f"replay cannot run it: {_message(error)}") from error
        if _inside(error):
            raise JudgeFault(says) from error
        return f"raises {says}"
    if returned is not None:
        return f"returns {type(returned).__name__}, but should write in place and return None"
    return ""


def told(error: Exception) -> str:
    """Class, message and innermost place of an exception."""
    if isinstance(error, JudgeFault):
        return str(error)
    return f"{type(error).__name__}: {_message(error)}{_innermost(error)}"


def _inside(error: Exception) -> bool:
    """True if the judge's own code raised it: the innermost frame that is no library's is there.

    What replay finds in a kernel is an error of replay's own classes; a function that does not take
    the arguments of the call fails in the frame that makes it.
    """
    if type(error).__module__ == "twinstep.replay.errors":
        return False
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if "site-packages" not in file.parts and LIBRARY not in file.parents:
            return frame.name != "call" and any(folder in file.parents for folder in INSIDE)
    return False


def _message(error: BaseException) -> str:
    lines = [line.strip() for line in _cause(error).splitlines() if line.strip(" ^")]
    # Compilers put the source in between: the first line has the place, the last one the error.
    ends = dict.fromkeys([*lines[:1], *lines[-1:]])
    return " ... ".join(ends) or "(no message)"


def _cause(error: BaseException) -> str:
    """The message of what set an exception off: a compiler wraps it once for every caller."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def _innermost(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if frame.filename != __file__][1:]
    if not outside:
        return ""
    last = outside[-1]
    return f" [{last.filename}:{last.lineno}]"
