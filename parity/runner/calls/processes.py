"""Processes that a process has started: found, and killed together."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Processes started by a process, by those, and so on; parents first."""
    children: dict[int, list[int]] = {}
    # Not by a pattern of paths, which may raise where a process ends meanwhile.
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            # The name of a program, in parentheses, may hold anything.
            parent = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        children.setdefault(int(parent), []).append(int(number))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def kill_descendants(root: int) -> None:
    """Kill all that a process has started.

    All are stopped first: one that goes on forks children, which its death would hide from us.
    """
    found: list[int] = []
    while fresh := [pid for pid in descendants(root) if pid not in found]:
        _send(fresh, signal.SIGSTOP)
        found += fresh
    _send(found, signal.SIGKILL)


def kill_session(leader: int) -> None:
    """Kill a process that leads a session of its own, and all that it has started."""
    _send([leader], signal.SIGSTOP)
    kill_descendants(leader)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    _send([leader], signal.SIGKILL)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
