"""Resources of the machine: memory that is free, and processor time that others took."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from twinstep.benchmarks.beside.peers import peers_of
from twinstep.benchmarks.beside.rows import STEP, Group, ours
from twinstep.parity.registry.kernels import Kernel

STEP_BYTES = 40  # of an element in all tensors of a class's row, and what restores them
STEP_ROWS = 8
PASSES = 3  # rows that move as many bytes as a kernel
BUSY = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"]
IDLE = ("idle", "iowait")
STAT, MEMORY = Path("/proc/stat"), Path("/proc/meminfo")


def needed(kernels: Sequence[Kernel], group: Group) -> int:
    """Bytes of memory that all rows of a group hold at once, about."""
    if group.operation == STEP:
        return group.shape.numel * STEP_BYTES * STEP_ROWS
    mine = ours(kernels, group)
    operation = mine[0].operation
    row = 0
    for argument in operation.lists:
        dtypes = operation.combinations[group.dtype].get(argument.name, ())
        size = max((dtype.itemsize for dtype in dtypes), default=0)
        row += size
    rows = len(mine) + 1 + len(peers_of(operation.name, torch.device("cpu"))) + PASSES
    return group.shape.numel * row * (rows + 1)  # all rows share what theirs held at first


def available() -> int:
    """Bytes of memory that are free where kernels are timed."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    told = (
        dict(line.split(":") for line in MEMORY.read_text().splitlines()) if MEMORY.exists() else {}
    )
    if "MemAvailable" in told:
        return 1024 * int(told["MemAvailable"].split()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Others:
    """Processor time that others take from now on, where Linux tells it."""

    def __init__(self) -> None:
        self._begun, self._busy, self._own = time.perf_counter(), busy(), own()

    def share(self) -> float | None:
        """Of all cores' time since it began; None where it is not told."""
        if self._busy is None:
            return None
        others = (busy() or 0.0) - self._busy - (own() - self._own)
        seconds = (time.perf_counter() - self._begun) * (os.cpu_count() or 1)
        return round(max(0.0, others / seconds), 3)


def busy() -> float | None:
    """Seconds of all cores that were used by anybody, other guests of the host included."""
    if not STAT.exists():
        return None
    ticks = STAT.read_text().split("\n", 1)[0].split()[1:]
    used = sum(int(tick) for name, tick in zip(BUSY, ticks, strict=False) if name not in IDLE)
    return used / os.sysconf("SC_CLK_TCK")


def own() -> float:
    """Seconds that this process and those that it waited for have used."""
    return sum(os.times()[:4])
