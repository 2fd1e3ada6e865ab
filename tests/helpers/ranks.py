"""Ranks as threads: process groups that are simulated, on which all or one at a time run."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TURN = threading.Lock()


class Meeting:
    """Meeting point of the threads that stand for ranks and bring their tensors."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.brought: dict[int, Tensor] = {}


class Group:
    """One rank's handle of a process group; the fixture `simulated` sends collectives to it."""

    def __init__(self, meeting: Meeting, rank: int, world: int) -> None:
        self.meeting, self.rank, self.world = meeting, rank, world

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of all ranks, in order."""
        self.meeting.brought[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        found = [self.meeting.brought[rank] for rank in range(self.world)]
        self.meeting.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: object) -> None:
        """Sum or maximum."""
        stacked = torch.stack(self.exchange(tensor))
        tensor.copy_(stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.amax(0))

    def all_gather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        """One output per rank."""
        for output, found in zip(outputs, self.exchange(tensor), strict=True):
            output.copy_(found)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> None:
        """All ranks' in a row."""
        output.copy_(torch.cat(self.exchange(tensor)))

    def all_gather_object(self, outputs: list[object], own: object) -> None:
        """One output per rank, of any kind."""
        sent = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        outputs[:] = [pickle.loads(bytes(found.tolist())) for found in self.exchange(sent)]


class Polite(Group):
    """A rank that runs alone, but for when it waits for others: replay is not for threads."""

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Let others run until they have come as far."""
        TURN.release()
        try:
            return super().exchange(tensor)
        finally:
            TURN.acquire()


def on_ranks(world: int, run: Callable[[Group | None], T]) -> list[T]:
    """Run a function on every rank at once; a world of one has no group."""
    if world == 1:
        return [run(None)]
    meeting = Meeting(world)
    results: dict[int, T] = {}

    def one(rank: int) -> None:
        results[rank] = run(Group(meeting, rank, world))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world)]


@contextmanager
def turn() -> Iterator[None]:
    """Hold the turn."""
    TURN.acquire()
    try:
        yield
    finally:
        TURN.release()


def in_turns(world: int, run: Callable[[Polite | None], T]) -> list[T]:
    """Run a function on every rank, one at a time."""

    def polite(group: Group | None) -> T:
        with turn():
            if group is None:
                return run(None)
            return run(Polite(group.meeting, group.rank, group.world))

    return on_ranks(world, polite)
