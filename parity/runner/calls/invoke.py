"""Call a kernel that may raise, hang, exit, or return what it should not."""

from __future__ import annotations

import contextlib
import errno
import re
import select
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from twinstep.parity.records.errors import CannotJudge, CannotRun, JudgeFault, KernelTimeout
from twinstep.parity.registry.engines import followed
from twinstep.parity.runner.calls.places import INSTALLED, OURS, line_of, place_in, place_of

SECONDS = 20.0
# A kernel that waits gets this many times as much by the clock.
PATIENCE = 2
# False where another process counts that, which sees the kernel's processes too.
COUNTS_WAITING = [True]
STDOUT = 1
# A class of torch.cuda in a torch that was built without CUDA.
DUMMY = re.compile(r"dummy base class (\w+)")
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}

# Code of ours that runs inside a call, apart from kernels and from what passes calls on.
INSIDE = tuple(str(OURS / folder) for folder in ("parity/cases", "replay"))


class Callee(Protocol):
    """The arguments of a call."""

    block: Tensor

    def call(self, kernel: Callable[..., object]) -> object:
        """Call the kernel with them."""


@dataclass(frozen=True)
class Ended:
    """End of a call.

    Attributes:
        failure: what happened instead of a return of None; empty if nothing did.
        fatal: `hang`, `exit` or `compile` if every further call would end alike; else empty.
        caught: words for the launch that raised what is in `failure`, and whose caller went on.
        launches: how many launches ran to their end on replay.
    """

    failure: str = ""
    fatal: str = ""
    caught: str = ""
    launches: int = 0


@dataclass(frozen=True)
class Spent:
    """Seconds of the main thread: by the clock, of work, and ready to work without a core."""

    clock: float
    work: float
    queued: float

    @classmethod
    def now(cls) -> Spent:
        """Those until now."""
        clock = time.monotonic()
        with contextlib.suppress(OSError):
            work, queued, _ = Path("/proc/self/schedstat").read_text().split()
            return cls(clock, int(work) / 1e9, int(queued) / 1e9)
        return cls(clock, time.thread_time(), 0.0)

    def since(self, before: Spent) -> Spent:
        """The difference from an earlier time."""
        return Spent(
            self.clock - before.clock, self.work - before.work, self.queued - before.queued
        )

    def too_much(self, seconds: float) -> str:
        """Words for more than a call may take; empty if it is not."""
        waited = self.clock - self.work - self.queued
        if self.work >= seconds:
            return f"{seconds:g} s of work"
        patience = PATIENCE * seconds
        too_long = COUNTS_WAITING[0] and waited >= patience
        return f"{patience:g} s of waiting" if too_long else ""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `KernelTimeout` inside the block after that many seconds of the processor's time.

    Seconds by the clock would call a kernel hanging because the machine is busy with others; one
    that waits, for a lock or for its compiler, gets `PATIENCE` times as many, without those in
    which it could have worked and had no core. Works by SIGALRM, so only in the main thread and
    between Python instructions; elsewhere there is no limit.
    """
    alarms = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if not alarms or seconds <= 0:
        yield
        return
    began = Spent.now()

    def ring(number: int, frame: FrameType | None) -> None:
        spent = Spent.now().since(began).too_much(seconds)
        if spent and not _unread():
            # A kernel that swallows this is interrupted again: the timer goes on.
            raise KernelTimeout(f"no return after {spent}{place_in(frame)}")

    previous, started = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 8)
    try:
        yield
    finally:
        # A caller's own limit goes on.
        rest = max(left - (time.monotonic() - started), 1e-3) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, rest, again)


def _unread() -> bool:
    """True if the process waits for the reader of its output: that is nothing of the kernel's."""
    with contextlib.suppress(OSError):
        return not select.select((), (STDOUT,), (), 0.0)[1]
    return False


def invoke(function: Callable[..., object], memory: Callee, seconds: float = SECONDS) -> Ended:
    """Call a kernel on its memory; a launch that raised is its end, whoever caught that.

    Raises:
        CannotJudge: the judge asks for more than there is.
        JudgeFault: the judge or replay itself went wrong.
        CannotRun: for want of an instruction, a device, memory, a module, or a place to write to.
        KeyboardInterrupt: the user's, not one that the kernel raised.
    """
    with followed() as fates:
        ended, own = _returned(function, memory, seconds)
    if fates is None:
        return ended
    caught = [row for row in fates.raised if id(row[1]) != own]
    if caught and ended.fatal not in ("hang", "exit"):
        kernel, error = caught[0]
        words = f"launch of `{kernel}` raised {type(error).__name__}"
        ended = replace(raised(error), caught=words)
    return replace(ended, launches=fates.completed)


def _returned(function: Callable[..., object], memory: Callee, seconds: float) -> tuple[Ended, int]:
    """The end of the function itself, and the identity of the exception that it ended with, or 0.

    The exception would keep the call's tensors, which the frames of its traceback hold.
    """
    try:
        with time_limit(seconds):
            returned = memory.call(function)
            if memory.block.is_cuda:
                torch.cuda.synchronize()
    except KernelTimeout as timeout:
        return Ended(f"hangs: {timeout}", "hang"), 0
    except CannotJudge:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _interruptible():
            raise
        return raised(error), id(error)
    if returned is not None:
        found = type(returned).__name__
        return Ended(f"returns {found}, but should write in place and return None"), 0
    return Ended(), 0


def _interruptible() -> bool:
    """True if Ctrl-C reaches this process; a process of a kernel's own ignores it."""
    return signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def raised(error: BaseException) -> Ended:
    """The end of a call that raised.

    Raises:
        CannotRun: see `invoke`.
    """
    if isinstance(error, SystemExit):
        return Ended(f"ends its process: SystemExit({error.code!r}){place_of(error)}", "exit")
    reason = unable(error)
    if reason:
        raise CannotRun(reason) from None
    compiler = type(error).__module__.startswith("triton.compiler")
    if compiler or "PassManager::run failed" in str(error):
        # Triton prints the source before the error.
        says = _message(error).rpartition(" ... ")[2]
        return Ended(f"does not compile: {says}{line_of(error)}", "compile")
    if _inside(error):
        raise JudgeFault("".join(traceback.format_exception(error))) from error
    return Ended(f"raises {type(error).__name__}: {_message(error)}{line_of(error)}")


def _inside(error: BaseException) -> bool:
    """True if the judge's own code raised it: the innermost frame that is no library's is there.

    What replay finds in a kernel is an error of replay's own classes; a function that does not take
    the arguments of the call fails in the frame that makes it.
    """
    if type(error).__module__ == "twinstep.replay.errors":
        return False
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.name == "__torch_function__":
            # What the kernel asks of torch passes here where a GPU is modelled.
            continue
        if frame.filename.startswith(INSIDE):
            return frame.name != "call"
        if not frame.filename.startswith(INSTALLED):
            return False
    return False


def unable(error: BaseException) -> str:
    """Reason why a kernel cannot be run here, if that is what an exception shows."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    for one in chain:
        if _is_limit(one):
            return f"{one}"
        reason = _lacking(one)
        if reason:
            return f"the kernel {reason}{place_of(error)}"
    return ""


def _is_limit(error: BaseException) -> bool:
    """True for a limit of replay, but for one of the law `formula` alone."""
    known = sys.modules.get("twinstep.replay.errors")
    limit, formula = (getattr(known, name, ()) for name in ("CannotReplay", "NotLiftable"))
    return isinstance(error, limit) and not isinstance(error, formula)


def _lacking(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, ModuleNotFoundError):
        return f"needs the module {error.name}, which is not installed"
    if text.startswith("there is no C++ compiler"):
        return "needs a C++ compiler, and there is none here"
    if text.startswith("kernels in CUDA C++ need"):
        return "needs NVRTC, which is not installed"
    # Triton keeps what it compiles below HOME.
    if isinstance(error, OSError) and (error.errno in UNWRITABLE or "/triton/" in _last(error)):
        return f"cannot write {error.filename or 'a file'}: {error.strerror}"
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if memory or "can't allocate memory" in text:
        return f"needs more memory than there is: {text.rpartition('] ')[2] or 'MemoryError'}"
    if not torch.cuda.is_available() and _asked_for_cuda(error):
        asked = DUMMY.search(text)
        what = f" (torch.cuda.{asked[1]})" if asked else ""
        return f"asks for a GPU{what}, and there is none here"
    return ""


def _asked_for_cuda(error: BaseException) -> bool:
    words = (
        "NVIDIA driver",
        "not compiled with CUDA",
        "No CUDA GPUs",
        "CUDA driver",
        "without ATen_cuda library",
        "from the 'CUDA' backend",
        "dummy base class",
    )
    inside = "/torch/cuda/" in _last(error) and isinstance(error, AssertionError | RuntimeError)
    return inside or any(word in str(error) for word in words)


def _last(error: BaseException) -> str:
    """File that raised an exception, unless that is the standard library."""
    standard = sysconfig.get_path("stdlib") + "/"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [f for f in files if "/site-packages/" in f or not f.startswith((standard, "<"))]
    return (own or [""])[-1]


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
