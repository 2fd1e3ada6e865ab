"""Source of worker processes: one server imports everything once and forks them all.

A process that starts from nothing spends four seconds of a core on imports, and another on Triton's
hash of its own libraries. Nothing is imported here but the standard library, so that the server can
be at work while this process is still importing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
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


def start_server() -> None:
    """Let the server import while this process does; it ends with this process."""
    if fresh_processes().get_start_method() == "forkserver":
        forkserver.ensure_running()


@contextmanager
def beside(
    call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Iterator[Callable[[], Result]]:
    """Run a call in a process of its own; inside the context, a function that waits for it."""
    with ProcessPoolExecutor(1, mp_context=fresh_processes()) as pool:
        yield pool.submit(call, *args, **kwargs).result
