"""Ctrl-C: the command ends at once with one sentence, exit code 130, and no process left behind.

SIGINT is blocked in every thread, and in every process started from here, which inherits that; one
thread waits for it. So neither a kernel that catches everything nor an import can swallow it, and a
worker never sees it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from twinstep.parity.cli.ending import tell
from twinstep.parity.records.errors import EXIT_SIGNAL
from twinstep.parity.runner.calls.processes import kill_descendants

_last_words: list[Callable[[], str | None]] = []


def watch() -> None:
    """End this process on SIGTERM, and on SIGINT unless that is ignored, as by nohup."""
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    signal.signal(signal.SIGINT, _end)
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
    tell(code)
    kill_descendants(os.getpid())
    os._exit(code)
