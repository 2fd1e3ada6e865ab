"""Ctrl-C: the command ends at once with one sentence, exit code 130, and no process left behind.

SIGINT is blocked in every thread, and in every process started from here, which inherits that; one
thread waits for it. So neither a kernel that catches everything nor an import can swallow it, and a
worker never sees it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from twinstep.parity.records.errors import EXIT_SIGNAL

_last_words: list[Callable[[], str | None]] = []


def watch() -> None:
    """End this process on SIGINT and SIGTERM; does nothing where SIGINT is ignored, as by nohup."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from multiprocessing import resource_tracker

    # It unblocks SIGINT when it is started: here, rather than by the first worker.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_wait, name="interrupt", daemon=True).start()


def before_the_end(say: Callable[[], str | None]) -> None:
    """Have an interrupted command print what is on record, and say how much that is."""
    _last_words[:] = [say]


def _wait() -> None:
    _end(signal.sigwait({signal.SIGINT}), None)


def _end(number: int, frame: FrameType | None) -> None:
    how = "interrupted" if number == signal.SIGINT else "terminated"
    code = EXIT_SIGNAL + number
    # Whatever goes wrong with the last words, the process ends and takes its children along.
    guard = threading.Timer(1.5, _exit, (code,))
    guard.daemon = True
    guard.start()
    try:
        said = [how, *(text for say in _last_words if (text := say()))]
        print(f"parity: {': '.join(said)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        _exit(code)


def _exit(code: int) -> None:
    cancel()
    os._exit(code)


def cancel() -> None:
    """Kill every descendant of this process, workers and the compilers that they started.

    All are stopped first: one that goes on forks children, which its death would hide from us.
    """
    found: list[int] = []
    while fresh := [pid for pid in descendants(os.getpid()) if pid not in found]:
        _send(fresh, signal.SIGSTOP)
        found += fresh
    _send(found, signal.SIGKILL)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(root: int) -> list[int]:
    """Processes started by a process, by those, and so on; parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a program, in parentheses, may hold anything.
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]
