"""Run a Python file in a process that has made its imports already."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from twinstep.parity.runner.calls.processes import kill_session
from twinstep.parity.runner.fork_server import fresh_processes


def run_program(words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """End of a Python file that was run in a fork.

    Args:
        words: path of the file, and its arguments.
        seconds: the process and all that it has started are killed after so long.

    Raises:
        TimeoutExpired: it did not end by itself.
    """
    with TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        process: Any = cast(Any, fresh_processes()).Process(target=_program, args=(words, outputs))
        process.start()
        # Joined last: its number must not be another's while it is used.
        ended = bool(wait([process.sentinel], seconds))
        kill_session(process.pid)
        process.join()
        if not ended:
            raise subprocess.TimeoutExpired(list(words), seconds)
        said = [Path(path).read_text(errors="replace") for path in outputs]
    return subprocess.CompletedProcess(words, process.exitcode, *said)


def _program(words: Sequence[str], outputs: Sequence[str]) -> None:
    os.setsid()
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), stream)
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
