"""Waiting for events: what does not come in a generous time is named, with what was printed.

How long a process takes says nothing on a machine that does other things.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

LIMIT_S = 600.0
Processes = Mapping[str, Any]


def wait_for(event: str, happened: Callable[[], object], said: Callable[[], object] = str) -> None:
    """Wait until something has happened.

    Args:
        event: its name.
        happened: whether it has.
        said: what is printed if it does not.
    """
    end = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end, f"waited {LIMIT_S:g} s in vain for {event}\n{said()}"
        time.sleep(0.01)


def output_of(run: subprocess.Popen[str], limit: float = LIMIT_S) -> tuple[str, str]:
    """Standard output and error of a program, once it has ended."""
    try:
        return run.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        run.kill()
        out, err = run.communicate()
        raise AssertionError(
            f"waited {limit:g} s in vain for the end of {run.args!r}\n{out}\n{err}"
        ) from None


def finished(
    command: Sequence[str], *, limit: float = LIMIT_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its output is kept."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as run:
        out, err = output_of(run, limit)
    return subprocess.CompletedProcess(command, run.returncode, out, err)


def ended_well(processes: Processes, folder: Path) -> None:
    """Wait until all of these processes have ended with exit code 0.

    Args:
        processes: of multiprocessing, by name.
        folder: where each leaves what it has to say, see `said_in`.
    """

    def codes() -> dict[str, int | None]:
        return {name: process.exitcode for name, process in processes.items()}

    def over() -> bool:
        return None not in codes().values() or any(codes().values())

    wait_for(f"the end of {', '.join(processes)}", over, lambda: f"{codes()}\n{said_in(folder)}")
    assert set(codes().values()) == {0}, f"exit codes {codes()}\n{said_in(folder)}"


def said_in(folder: Path) -> str:
    """Texts of the files that begin with `said`."""
    files = sorted(folder.glob("said*"))
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


def limit_collectives(seconds: float, groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """From now on, collectives of the world and of these groups are given up after some seconds.

    A group that this process is no member of is a number.
    """
    torch_dist: Any = dist
    members = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    for group in (dist.group.WORLD, *members):
        torch_dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
