"""Source of worker processes: one server imports everything once and forks them all.

A process that starts from nothing spends four seconds of a core on imports, and another on Triton's
hash of its own libraries.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_started_in: dict[str, str] = {}


def fresh_processes() -> BaseContext:
    """The context for workers.

    They are not forked from this process: torch's threads and a CUDA context do not survive it. The
    server keeps the environment that it was started in; where that has changed since, and where
    there is no such server, every worker starts from nothing.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    if multiprocessing.parent_process() is not None and not _cuda_in_use():
        # A worker has one thread and can be forked again; a server of its own imports all anew.
        return multiprocessing.get_context("fork")
    if not _started_in:
        _started_in.update(_environment())
        multiprocessing.set_forkserver_preload(["twinstep.parity.runner.preload"])
    served = _started_in == _environment()
    return multiprocessing.get_context("forkserver" if served else "spawn")


def _cuda_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _environment() -> dict[str, str]:
    """What a worker can see of the environment; pytest notes its test there, without effect."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def start_server(forked: bool = False) -> None:
    """Let the server import while this process goes on; it ends with this process.

    Args:
        forked: from this process, which has imported torch, and has neither asked for a GPU nor
            computed yet. Otherwise the server imports all anew.
    """
    if fresh_processes().get_start_method() != "forkserver":
        return
    kept = util.spawnv_passfds
    if forked:
        # Both need it: torch imports it by itself, with the first tensor of another class.
        with suppress(ImportError):
            import_module("torch.distributed.tensor")
        # It is started by the same function, and would be a fork too.
        resource_tracker.ensure_running()
        util.spawnv_passfds = _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = kept


def _fork(path: object, args: Sequence[object], passfds: Sequence[int]) -> int:
    """Run the server's program, the last argument, in a fork of this process."""
    # What is still in the buffers, every worker would write again.
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # This process holds it while it starts the server.
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
        # The server ends when no process has the other end of its pipe open.
        first = 3
        for last in (*sorted(passfds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, last)
            first = last + 1
        exec(str(args[-1]), {})
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


@contextmanager
def beside(
    call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Iterator[Callable[[], Result]]:
    """Run a call in a process of its own; inside the context, a function that waits for it."""
    with ProcessPoolExecutor(1, mp_context=fresh_processes()) as pool:
        yield pool.submit(call, *args, **kwargs).result
