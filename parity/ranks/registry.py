"""Process groups as torch.distributed knows them, for each rank's thread by itself."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_TORCH: Any = dist  # exports without saying so
NAME = "simulated"
_HERE = threading.local()
_LOCK = threading.Lock()
_RUNS: list[object] = []
_NUMBERS = itertools.count()


class GroupRegistry:
    """Attributes that torch.distributed keeps of process groups; those of one rank.

    Args:
        new_group: makes a group of some ranks.
    """

    def __init__(self, new_group: Callable[[Sequence[int]], dist.ProcessGroup | None]) -> None:
        self.new_group = new_group
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[dist.ProcessGroup, tuple[str, object]] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, str] = {}
        self.pg_to_tag: dict[dist.ProcessGroup, str] = {}
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, list[object]] = {}
        self.comms: list[object] = []
        self._store = _TORCH.HashStore()

    @property
    def group_count(self) -> int:
        """A number that no other group of any rank gets: torch makes names of it.

        Names are known to the whole process, and threads of one name would take each other's group.
        """
        return next(_NUMBERS)

    @group_count.setter
    def group_count(self, value: int) -> None:
        """Nothing."""

    def enter(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """Make a group of these ranks known."""
        name = group.group_name
        self.pg_map[group], self.pg_names[group] = (NAME, self._store), name
        self.pg_backend_config[group] = NAME
        self.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}


def _create(options: Any, _: object) -> dist.ProcessGroup | None:
    """A group of torch.distributed.new_group, in the thread of one of its ranks."""
    registry: GroupRegistry = _HERE.registry
    return registry.new_group(options.global_ranks_in_group)


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
            if NAME not in _TORCH.Backend.backend_list:
                _TORCH.Backend.register_backend(
                    NAME, _create, extended_api=True, devices=["cpu", "cuda"]
                )
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
