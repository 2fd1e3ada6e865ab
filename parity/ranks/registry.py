"""Process groups as torch.distributed knows them, for each rank's thread by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_HERE = threading.local()
_LOCK = threading.Lock()
_RUNS: list[object] = []


class GroupRegistry:
    """Attributes that torch.distributed keeps of process groups; those of one rank."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[dist.ProcessGroup, tuple[str, None]] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, str] = {}
        self.pg_to_tag: dict[dist.ProcessGroup, str] = {}
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, list[object]] = {}
        self.comms: list[object] = []
        self.group_count = 0

    def enter(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Make a group of these ranks known."""
        name = group.group_name
        self.pg_map[group], self.pg_names[group] = ("simulated", None), name
        self.pg_backend_config[group] = "simulated"
        self.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}


class _ByThread:
    """The registry of the thread that asks: a rank's own, else the one that was there."""

    def __init__(self, outside: object) -> None:
        object.__setattr__(self, "outside", outside)

    def _own(self) -> Any:
        return getattr(_HERE, "registry", None) or object.__getattribute__(self, "outside")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._own(), name, value)


@contextmanager
def registries_by_thread() -> Iterator[None]:
    """Let torch.distributed ask for registries by thread, as long as any run needs it."""
    run = object()
    with _LOCK:
        if not _RUNS:
            c10d._world = _ByThread(c10d._world)  # type: ignore[assignment]
        _RUNS.append(run)
    try:
        yield
    finally:
        with _LOCK:
            _RUNS.remove(run)
            if not _RUNS:
                c10d._world = object.__getattribute__(c10d._world, "outside")


@contextmanager
def use_registry(registry: GroupRegistry) -> Iterator[None]:
    """Make it the one of this thread."""
    _HERE.registry = registry
    try:
        yield
    finally:
        del _HERE.registry
