"""A world of simulated ranks: its axes, its groups, and runs of a function on all ranks."""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from twinstep.parity.ranks.arithmetic import ORDERS
from twinstep.parity.ranks.calls import Communicator, PendingWork
from twinstep.parity.ranks.errors import RankLost, RanksFailed
from twinstep.parity.ranks.group import Sent, SimulatedGroup
from twinstep.parity.ranks.registry import GroupRegistry, registries_by_thread, use_registry
from twinstep.parity.ranks.turns import Abandoned, Turns

T = TypeVar("T")
JOIN_S = 5.0


@dataclass(frozen=True)
class World:
    """Ranks that are threads, of which one runs at a time.

    Everything that is drawn comes from the seed, and nothing else from anywhere: a run with the
    same arguments gives the same bits in the same order.

    Attributes:
        axes: number of ranks along each axis, by name; the last one is counted first. A number
            alone is a world with one axis, "data".
        seed: of whose turn it is, when collectives complete, places in reductions, and generators.
        order: of reductions, a name in `arithmetic.ORDERS`. Other than "ranks", an order starts
            from a permutation of the ranks that is drawn once for each group.
        late: collectives complete late and out of order; otherwise, once all ranks have come and
            the rank waits.
        patience: seconds after which a rank that comes no further is given up.
    """

    axes: Mapping[str, int] | int
    seed: int = 0
    order: str = "ranks"
    late: bool = True
    patience: float = 120.0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}, but should be one of {', '.join(ORDERS)}")
        if not all(size > 0 for size in self.sizes.values()):
            raise ValueError(f"axes={self.axes!r}, but should have a rank along each axis")

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of ranks along each axis."""
        return {"data": self.axes} if isinstance(self.axes, int) else self.axes

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def run(self, function: Callable[[Rank], T]) -> list[T]:
        """Results of a function on every rank.

        Raises:
            RanksFailed: some ranks have raised, stalled, or left a collective that failed.
        """
        return Run[T](self).results(function)


class Rank:
    """One rank of a run: its place, its groups, its generator.

    Attributes:
        number: in the world.
        place: along each axis.
        generator: of this rank alone.
        sent: its collectives so far, in order.
    """

    def __init__(self, run: Run[object], number: int) -> None:
        self._run, self.number = run, number
        sizes = run.world.sizes
        places = list(itertools.product(*map(range, sizes.values())))[number]
        self.place = dict(zip(sizes, places, strict=True))
        self.generator = torch.Generator().manual_seed(run.world.seed * run.world.size + number)
        self.sent: list[Sent] = []
        self.registry = GroupRegistry(self.new_group)
        self._handles: dict[tuple[str, ...], SimulatedGroup] = {}
        self._made: Counter[tuple[int, ...]] = Counter()
        self.registry.default_pg = self.group(*sizes)

    def group(self, *axes: str) -> SimulatedGroup:
        """The group of the ranks that differ from this one along these axes alone.

        Raises:
            ValueError: there is no such axis.
        """
        sizes = self._run.world.sizes
        if unknown := set(axes) - set(sizes):
            raise ValueError(f"no axis {sorted(unknown)}, but {', '.join(sizes)}")
        if axes not in self._handles:
            along = [
                range(size) if axis in axes else [self.place[axis]] for axis, size in sizes.items()
            ]
            strides = [math.prod(list(sizes.values())[at + 1 :]) for at in range(len(sizes))]
            ranks = [
                sum(at * stride for at, stride in zip(place, strides, strict=True))
                for place in itertools.product(*along)
            ]
            self._handles[axes] = self._handle(" and ".join(axes) or "alone", ranks)
        return self._handles[axes]

    def new_group(self, ranks: Sequence[int], name: str = "") -> SimulatedGroup | None:
        """A new group of some ranks, as `torch.distributed.new_group` makes it too.

        Args:
            ranks: of the group.
            name: of it; by default it is numbered.

        Returns:
            None on a rank that is no part of it.
        """
        if self.number not in ranks:
            return None
        if name:
            return self._handle(name, ranks)
        made = self._made[tuple(ranks)]
        self._made[tuple(ranks)] += 1
        return self._handle(f"new group {made}", ranks)

    def stall(self) -> None:
        """Do nothing until the run is over; never returns."""
        self._run.turns.stall(self.number)

    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Number of calls and of bytes that this rank handed in, by group and collective."""
        calls = Counter((each.group, each.collective) for each in self.sent)
        octets = Counter[tuple[str, str]]()
        for each in self.sent:
            octets[each.group, each.collective] += each.bytes
        return {key: (count, octets[key]) for key, count in calls.items()}

    def _handle(self, name: str, ranks: Sequence[int]) -> SimulatedGroup:
        comm = self._run.communicator(name, ranks)
        handle = SimulatedGroup(name, comm, list(ranks).index(self.number), self.sent)
        self.registry.enter(handle, ranks)
        return handle


class Run(Generic[T]):
    """One run of a function on all ranks of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.turns = Turns(world.size, world.seed, late=world.late)
        self._communicators: dict[str, Communicator] = {}
        self._returned: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """The part of a group that its ranks share."""
        full = f"group {name} of ranks {', '.join(map(str, ranks))}"
        with self.turns.lock:
            if full not in self._communicators:
                places = list(range(len(ranks)))
                if self.world.order != "ranks":
                    random.Random(f"{self.world.seed} {full}").shuffle(places)
                self._communicators[full] = Communicator(
                    full, ranks, self.world.order, places, self.turns
                )
            return self._communicators[full]

    def results(self, function: Callable[[Rank], T]) -> list[T]:
        """Results of all ranks, in order; see `World.run`."""
        ranks = [Rank(self, number) for number in range(self.world.size)]  # type: ignore[arg-type]
        # What holds by context holds for the ranks as well; replay's options are such.
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._one, rank, function), daemon=True
            )
            for rank in ranks
        ]
        with registries_by_thread():
            try:
                for thread in threads:
                    thread.start()
                self.turns.run(self.world.patience)
            finally:
                self.turns.close(_interrupt)
                for thread in threads:
                    if thread.ident is not None:
                        thread.join(JOIN_S)
        for work in self.turns.failed:
            if isinstance(work, PendingWork) and work.error is not None and not work.raised:
                self._errors.setdefault(work.rank, work.error)
        for number, reason in self.turns.stalled().items():
            left = ", and its thread has not ended" if threads[number].is_alive() else ""
            self._errors[number] = RankLost(f"rank {number} {reason}{left}", rank=number)
        if self._errors:
            returned = {at: own for at, own in self._returned.items() if at not in self._errors}
            failed = RanksFailed(self._errors, returned)
            raise failed from failed.first()
        return [self._returned[number] for number in range(self.world.size)]

    def _one(self, rank: Rank, function: Callable[[Rank], T]) -> None:
        """A rank's thread."""
        reason = "has returned"
        try:
            self.turns.begin(rank.number)
            # With worker threads of autograd, a hook of one rank could wait in that of another.
            with use_registry(rank.registry), torch.autograd.set_multithreading_enabled(False):
                self._returned[rank.number] = function(rank)
        except Abandoned:
            reason = "was abandoned"
        except BaseException as error:
            reason = f"has raised {': '.join(filter(None, (type(error).__name__, str(error))))}"
            self._errors[rank.number] = error
        finally:
            self.turns.end(rank.number, reason)


def _interrupt(thread: int) -> None:
    """Raise `Abandoned` in a thread at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Abandoned))
