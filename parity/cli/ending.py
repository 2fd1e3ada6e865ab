"""The command's exit code: told by the process that printed the verdict, and by nothing else.

That process is a child of the one that was started, which waits for it. A reference of a user's, a
library or the kernel of the operating system may end it in any way: then no code was told, and the
waiting process says so and ends with another code than 0.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

from twinstep.parity.records.errors import EXIT_SIGNAL, EXIT_TOO_LITTLE
from twinstep.parity.runner.calls.processes import kill_descendants

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PASSED_ON = {signal.SIGINT, signal.SIGTERM}

_told: list[tuple[int, int]] = []
"""The process that may tell the code, and where it writes it."""

_decided: list[int] = []
"""The codes that were told."""


def supervise() -> None:
    """Return in a child, whose end this process waits for and reports.

    SIGINT stays blocked in the child, until `interrupt.watch` has a thread that waits for it.
    """
    reader, writer = os.pipe()
    passed_on = {one for one in PASSED_ON if signal.getsignal(one) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    child = os.fork()
    if child:
        os.close(writer)
        _control(PR_SET_CHILD_SUBREAPER, 1)
        _wait(child, reader, {*passed_on, signal.SIGCHLD})
    # Without its parent nobody would hear of the verdict.
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(reader)
    _told[:] = [(os.getpid(), writer)]
    # First of all, so that it is the last that the process does.
    atexit.register(_leave)
    signal.pthread_sigmask(signal.SIG_SETMASK, before | (passed_on & {signal.SIGINT}))


def _control(what: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def tell(code: int) -> None:
    """Decide the exit code; a fork of the judge's process decides nothing."""
    for process, writer in _told:
        if process == os.getpid():
            os.write(writer, b"%d\n" % code)
            _decided.append(code)


def end(code: int) -> NoReturn:
    """End the command after everything has been printed and written."""
    sys.stdout.flush()
    sys.stderr.flush()
    tell(code)
    sys.exit(code)


def _leave() -> None:
    """End the process once its code is told.

    The interpreter would go on to walk through all that torch has, for half a second. Objects that
    are frozen to spare it that (`gc.freeze`) are leaks to Triton 3.9, which prints them.
    """
    if _decided and any(process == os.getpid() for process, _ in _told):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_decided[0])


def _wait(child: int, reader: int, signals: set[signal.Signals]) -> NoReturn:
    """Pass signals on until the child has ended; end as it told."""
    while True:
        number = signal.sigwait(signals)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    # Processes that the child has left behind may hold the other end.
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        # The first word counts: an end that is interrupted tells a second one.
        told = os.read(reader, 64).split()
        if told:
            os._exit(int(told[0]))
    # Its workers would wait for it for ever.
    kill_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    print(
        f"parity: the command's process ended with {how} before its verdict: something that it "
        "ran, such as a file's import, a reference or a library, has ended it",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_SIGNAL - code if code < 0 else EXIT_TOO_LITTLE)
