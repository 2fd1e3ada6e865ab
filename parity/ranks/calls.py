"""Collectives in flight: calls of the ranks of a group that meet, and the handle that each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.parity.ranks.errors import (
    BufferTouched,
    CollectiveError,
    MismatchedCalls,
    RankLost,
    Refused,
)
from twinstep.parity.ranks.requests import (
    Request,
    is_poison,
    octets,
    poison,
    results,
    span,
    unseen,
)
from twinstep.parity.ranks.turns import Turns


@dataclass(frozen=True)
class Communicator:
    """A group's ranks and the order of its reductions, the same for all of its calls.

    Attributes:
        name: with the ranks, for messages.
        ranks: numbers in the world, in the group's order.
        order: of reductions, a name in `arithmetic.ORDERS`.
        places: ranks of the group in the order in which a reduction takes them.
        turns: of the run.
        calls: that have not been met by all, by what is met: the number of the call in the group,
            or sender, receiver, tag and number.
    """

    name: str
    ranks: Sequence[int]
    order: str
    places: Sequence[int]
    turns: Turns
    calls: dict[tuple[int, ...], Call] = field(default_factory=dict)


class Call:
    """One collective of a group, in which its members meet.

    Args:
        comm: the group.
        key: in its calls.
        members: ranks of the group that take part; what the result takes them to be, in order.
    """

    def __init__(self, comm: Communicator, key: tuple[int, ...], members: Sequence[int]) -> None:
        self.comm, self.key, self.members = comm, key, members
        self.works: dict[int, PendingWork] = {}
        self._failure: tuple[type[CollectiveError], str] | None = None

    def join(self, member: int, work: PendingWork) -> None:
        """Enter one rank's part; the last one brings the results."""
        turns = self.comm.turns
        self.works[member] = work
        turns.flying.append(work)
        missing = [other for other in self.members if other not in self.works]
        if not missing:
            self.comm.calls.pop(self.key, None)
        if self._failure is not None:
            work.fail(*self._failure)
            return
        first_member, first = next(iter(self.works.items()))
        if first.request.signature() != work.request.signature():
            ranks = self.comm.ranks
            self.fail(
                MismatchedCalls,
                f"rank {ranks[first_member]} calls {first.request}, "
                f"but rank {ranks[member]} calls {work.request}",
            )
        elif not missing:
            turns.moved()
            self._complete()
        elif not work.fail_for(turns.lost):
            turns.moved()

    def _complete(self) -> None:
        works = [self.works[member] for member in self.members]
        # The snapshots: what the ranks' own tensors hold by now is what flight has made of them.
        sent = [replace(work.request, inputs=work.snapshot) for work in works]
        root = sent[0].root
        if root is not None:
            sent = [replace(each, root=self.members.index(root)) for each in sent]
        places = [self.members.index(place) for place in self.comm.places if place in self.members]
        found = results(sent, self.comm.order, places)
        for work, own in zip(works, found, strict=True):
            for mine, theirs in zip(work.request.outputs, own, strict=True):
                if mine is not None and mine.numel() != theirs.numel():
                    self.fail(
                        MismatchedCalls,
                        f"rank {work.rank} takes {mine.numel()} elements in {work.request}, "
                        f"but is sent {theirs.numel()}",
                    )
                    return
        for work, own in zip(works, found, strict=True):
            work.values = own

    def fail(self, kind: type[CollectiveError], says: str) -> None:
        """Fail for all ranks, those that come later included."""
        self._failure = (kind, says)
        for work in self.works.values():
            work.fail(kind, says)


class PendingWork(dist.Work):
    """One rank's handle of a collective, which completes late; until then outputs are poisoned.

    Attributes:
        rank: number in the world.
        request: as this rank made it.
        snapshot: copies of the inputs at the time of the call.
        values: of the outputs, once all ranks have come.
        error: instead of them.
        raised: whether the rank has seen its error.
    """

    def __init__(self, rank: int, request: Request, call: Call) -> None:
        super().__init__()
        self.rank, self.request, self._call = rank, request, call
        self.snapshot = [part.clone() for part in request.inputs]
        self.values: Sequence[Tensor] | None = None
        self.error: CollectiveError | None = None
        self.raised = self._done = False
        outputs = [output for output in request.outputs if output is not None]
        written = {span(output) for output in outputs}
        self._kept = [
            (part, copy)
            for part, copy in zip(request.inputs, self.snapshot, strict=True)
            if span(part) not in written
        ]
        for output in outputs:
            poison(output)

    def __str__(self) -> str:
        return f"{self.request} on {self._call.comm.name}"

    def arrived(self) -> bool:
        """True once it has failed, or all ranks have come."""
        return self._done or self.error is not None or self.values is not None

    def deliver(self) -> None:
        """Write the outputs, unless something else has written there meanwhile."""
        if self._done or self.error is not None or self.values is None:
            return
        self._land()
        with unseen():
            self._write(self.values)

    def _write(self, values: Sequence[Tensor]) -> None:
        pairs = list(zip(self.request.outputs, values, strict=True))
        touched = not all(torch.equal(octets(part), octets(copy)) for part, copy in self._kept)
        if touched:
            self.fail(BufferTouched, "an input was written while the collective was in flight")
        elif not all(mine is None or is_poison(mine) for mine, _ in pairs):
            self.fail(BufferTouched, "an output was written while the collective was in flight")
        else:
            self._done = True
            for mine, theirs in pairs:
                if mine is not None:
                    mine.copy_(theirs)

    def fail(self, kind: type[CollectiveError], says: str) -> None:
        """Let `wait` raise."""
        self._land()
        if self.error is None and not self._done:
            facts = {"group": self._call.comm.name, "collective": str(self.request)}
            self.error = kind(says, rank=self.rank, **facts)
            self._call.comm.turns.failed.append(self)

    def fail_for(self, lost: Mapping[int, str]) -> bool:
        """Fail if a rank that has not come is lost, and give the reason."""
        ranks = self._call.comm.ranks
        missing = [ranks[m] for m in self._call.members if m not in self._call.works]
        reasons = [f"rank {rank} {lost[rank]}" for rank in missing if rank in lost]
        if self.arrived() or not reasons:
            return False
        self._call.fail(RankLost, f"{' and '.join(reasons)}, and does not come")
        return True

    def _land(self) -> None:
        flying = self._call.comm.turns.flying
        if self in flying:
            flying.remove(self)

    # What torch.distributed calls.

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the outputs.

        Raises:
            CollectiveError: the collective has failed, or a buffer was written in flight.
        """
        turns = self._call.comm.turns
        if not self._done and self.error is None:
            turns.wait(self.rank, self)
        if not self._done and self.error is None:
            with turns.lock:
                self.fail(RankLost, f"rank {self.rank} {turns.lost[self.rank]}")
        if self.error is not None:
            self.raised = True
            raise self.error
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """True once it has ended; others run meanwhile, so that a loop that asks does end."""
        if not self._done and self.error is None:
            self._call.comm.turns.poll(self.rank)
        return self._done or self.error is not None

    def is_success(self) -> bool:
        """True once outputs have been written."""
        return self._done

    def exception(self) -> CollectiveError | None:
        """The error, if it has failed."""
        return self.error

    def result(self) -> list[Tensor]:
        """The outputs, after waiting."""
        self.wait()
        return [output for output in self.request.outputs if output is not None]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """The outputs as a future, for whoever waits there."""
        return _PendingFuture(self)

    def refusal(self, says: str) -> Refused:
        """The error for a call that no handle carries out."""
        facts = {"group": self._call.comm.name, "collective": str(self.request)}
        return Refused(says, rank=self.rank, **facts)


class _PendingFuture(torch.futures.Future[list[Tensor]]):
    """A future of torch that waits as its work does; torch's own would keep the turn."""

    def __init__(self, work: PendingWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> list[Tensor]:
        return self._work.result()

    value = wait

    def done(self) -> bool:
        return self._work.is_completed()


def _refused(cls: type, name: str) -> Callable[..., object]:
    def refuse(self: PendingWork | _PendingFuture, *args: object, **options: object) -> object:
        work = self if isinstance(self, PendingWork) else self._work
        raise work.refusal(f"{cls.__name__.strip('_')}.{name} is not simulated")

    return refuse


for _cls, _names in (
    (PendingWork, ("get_future_result", "block_current_stream")),
    (_PendingFuture, ("then", "add_done_callback", "set_result", "set_exception")),
):
    for _name in _names:
        setattr(_cls, _name, _refused(_cls, _name))
