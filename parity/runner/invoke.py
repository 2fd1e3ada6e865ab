"""Call a kernel that may raise, hang, or return what it should not."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from twinstep.parity.records.errors import KernelTimeout

SECONDS = 20.0
PATIENCE = 10


class Callee(Protocol):
    """The arguments of a call."""

    block: Tensor

    def call(self, kernel: Callable[..., object]) -> object:
        """Call the kernel with them."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `KernelTimeout` inside the block after so many seconds of the processor's time.

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
    """Call a kernel on its memory; empty if it returned None, otherwise what happened instead."""
    try:
        with time_limit(seconds):
            returned = memory.call(function)
            if memory.block.is_cuda:
                torch.cuda.synchronize()
    except KernelTimeout as timeout:
        return f"hangs: {timeout}"
    except Exception as error:
        return f"raises {type(error).__name__}: {_message(error)}{_innermost(error)}"
    if returned is not None:
        return f"returns {type(returned).__name__}, but should write in place and return None"
    return ""


def _message(error: BaseException) -> str:
    lines = [line.strip() for line in _cause(error).splitlines() if line.strip(" ^")]
    # Compilers put the source in between: the first line says where, the last one what.
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
