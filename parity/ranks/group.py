"""A simulated process group: what `torch.distributed` calls, turned into requests."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.parity.ranks.arithmetic import Operation, operation_of
from twinstep.parity.ranks.calls import Call, Communicator, PendingWork
from twinstep.parity.ranks.errors import Refused
from twinstep.parity.ranks.requests import Request, check_memory, flat, span, unseen


@dataclass(frozen=True)
class Sent:
    """One collective of one rank.

    Attributes:
        group: its name, without ranks.
        collective: its name in `torch.distributed`.
        elements: of the tensors that this rank hands in; of a root's alone where only a root does.
        dtype: of them; None without any.
        bytes: of them. What an algorithm sends on the wire may be more or less.
        operation: of a reduction; empty without one.
        where: the group's name, with ranks.
    """

    group: str
    collective: str
    elements: int
    dtype: torch.dtype | None
    bytes: int
    operation: str = field(default="", compare=False)
    where: str = field(default="", compare=False)


class Reducing(Protocol):
    """Options of a call that reduces."""

    @property
    def reduceOp(self) -> dist.ReduceOp:
        """The operation."""


class Rooted(Protocol):
    """Options of a call with a root."""

    @property
    def rootRank(self) -> int:
        """Rank in the group."""


class ReducingToRoot(Reducing, Rooted, Protocol):
    """Options of a call that reduces to a root."""


class Collectives:
    """Methods of a process group that torch.distributed calls, as requests to a comm.

    Attributes:
        comm: what the group's ranks share.
        member: rank of this handle, in the group.
        count: of ranks.
        sent: record of this rank's collectives.
    """

    comm: Communicator
    count: int
    member: int
    sent: list[Sent]
    _name: str
    _numbers: Counter[tuple[int, ...]]

    # torch 2.11 calls some of these by the names that are given after them.

    def allreduce(self, tensors: list[Tensor], opts: Reducing) -> dist.Work:
        """All-reduce of one tensor, in place."""
        return self._reduced("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Reducing) -> dist.Work:
        """All-reduce of several tensors, in place."""
        return self._reduced("all_reduce_coalesced", tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: ReducingToRoot) -> dist.Work:
        """Reduction to the root."""
        return self._reduced("reduce", tensors, opts, opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Rooted) -> dist.Work:
        """The root's tensor to all."""
        own = self._flat("broadcast", tensors)
        is_root = opts.rootRank == self.member
        return self._post(
            Request(
                "broadcast",
                own if is_root else (),
                () if is_root else own,
                root=opts.rootRank,
                agreed=sizes(own),
                dtype=dtype_of(own),
            )
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """All-gather into lists, one output for each rank."""
        return self._gathered("all_gather", outputs, inputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """All-gather of several tensors; a list of outputs for each rank."""
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self._gathered("all_gather_coalesced", by_input, inputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: object = None) -> dist.Work:
        """All-gather into one tensor."""
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """All-gather of several tensors, each into one."""
        name = "all_gather_into_tensor"
        pieces = [self._pieces(name, output) for output in outputs]
        return self._gathered(name, pieces, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Rooted) -> dist.Work:
        """All tensors to the root."""
        own = self._flat("gather", inputs)
        taken = self._flat("gather", outputs[0] if opts.rootRank == self.member else ())
        self._require_sizes("gather", taken, list(own) * self.count if taken else [])
        return self._post(
            Request(
                "gather", own, taken, root=opts.rootRank, agreed=sizes(own), dtype=dtype_of(own)
            )
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Rooted) -> dist.Work:
        """A tensor of the root's to each."""
        taken = self._flat("scatter", outputs)
        own = self._flat("scatter", inputs[0] if opts.rootRank == self.member else ())
        self._require_sizes("scatter", own, list(taken) * self.count if own else [])
        return self._post(
            Request(
                "scatter", own, taken, root=opts.rootRank, agreed=sizes(taken),
                dtype=dtype_of(taken),
            )
        )  # fmt: skip

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Reducing
    ) -> dist.Work:
        """Reduction of lists, of which each rank gets its place."""
        return self._scattered("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Reducing) -> dist.Work:
        """Reduction of one tensor, of which each rank gets its share."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Reducing
    ) -> dist.Work:
        """Reduction of several tensors, of which each rank gets its shares."""
        name = "reduce_scatter_tensor"
        pieces = [self._pieces(name, given) for given in inputs]
        return self._scattered(name, outputs, pieces, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        """A tensor from each rank to each."""
        return self._exchanged("all_to_all", outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: object = None,
    ) -> dist.Work:
        """A part of one tensor from each rank to each; sizes are those of the first dimension."""
        name = "all_to_all_single"
        outputs = self._pieces(name, output, output_sizes)
        return self._exchanged(name, outputs, self._pieces(name, given, input_sizes))

    alltoall_base = all_to_all_single

    def barrier(self, opts: object = None) -> dist.Work:
        """A meeting of all ranks."""
        return self._post(Request("barrier"))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        """A tensor to another rank, which has to receive it: nothing is buffered."""
        own = self._flat("send", tensors)
        request = Request("point_to_point", own, (), None, self.member, sizes(own), dtype_of(own))
        return self._post(request, (self.member, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """A tensor from one rank."""
        own = self._flat("recv", tensors)
        request = Request("point_to_point", (), own, None, source, sizes(own), dtype_of(own))
        return self._post(request, (source, self.member, tag))

    # The way of a request.

    def _reduced(
        self, name: str, tensors: list[Tensor], opts: Reducing, root: int | None = None
    ) -> dist.Work:
        own = self._flat(name, tensors)
        written = own if root in (None, self.member) else ()
        operation = self._operation(name, opts, own)
        return self._post(Request(name, own, written, operation, root, sizes(own), dtype_of(own)))

    def _gathered(
        self, name: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> dist.Work:
        own = self._flat(name, inputs)
        taken: list[Tensor | None] = []
        for given, pieces in zip(own, outputs, strict=True):
            places = self._flat(name, pieces)
            self._require_sizes(name, places, [given] * self.count)
            is_own = [
                rank == self.member and span(p) == span(given) for rank, p in enumerate(places)
            ]
            taken += [None if own else p for p, own in zip(places, is_own, strict=True)]
        return self._post(Request(name, own, taken, agreed=sizes(own), dtype=dtype_of(own)))

    def _scattered(
        self, name: str, outputs: list[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Reducing
    ) -> dist.Work:
        taken = self._flat(name, outputs)
        pieces = [self._flat(name, each) for each in inputs]
        for output, parts in zip(taken, pieces, strict=True):
            if len(parts) != self.count:
                raise self._refused(name, f"has {len(parts)} inputs for {self.count} ranks")
            self._require_sizes(name, [output], [parts[self.member]])
        own = list(itertools.chain(*pieces))
        operation = self._operation(name, opts, own)
        return self._post(
            Request(name, own, taken, operation, agreed=sizes(own), dtype=dtype_of(own))
        )

    def _exchanged(
        self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> dist.Work:
        own, taken = self._flat(name, inputs), self._flat(name, outputs)
        for count in (len(own), len(taken)):
            if count != self.count:
                raise self._refused(name, f"has {count} tensors for {self.count} ranks")
        return self._post(Request(name, own, taken, agreed=None, dtype=dtype_of(own)))

    def _post(self, request: Request, pair: tuple[int, int, int] | None = None) -> PendingWork:
        """Enter this rank's part; blocks never."""
        dtypes = {part.dtype for part in (*request.inputs, *request.outputs) if part is not None}
        if len(dtypes) > 1:
            raise self._refused(request.collective, f"has tensors of {sorted(map(str, dtypes))}")
        try:
            check_memory(request)
        except ValueError as error:
            raise self._refused(request.collective, str(error)) from None
        if pair and pair[0] == pair[1]:
            raise self._refused(request.collective, "a rank sends to itself")
        own = pair or ()
        key = (*own, self._numbers[own])
        self._numbers[own] += 1
        members = pair[:2] if pair else range(self.count)
        with self.comm.turns.lock, unseen():
            call = self.comm.calls.get(key) or Call(self.comm, key, members)
            self.comm.calls[key] = call
            work = PendingWork(self.comm.ranks[self.member], request, call)
            call.join(self.member, work)
            elements = sum(part.numel() for part in request.inputs)
            octets = sum(part.numel() * part.element_size() for part in request.inputs)
            facts = (self._name, request.collective, elements, request.dtype, octets)
            operation = "" if request.operation is None else request.operation.name
            self.sent.append(Sent(*facts, operation=operation, where=self.comm.name))
        return work

    def _flat(self, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        try:
            return [flat(tensor) for tensor in tensors]
        except ValueError as error:
            raise self._refused(name, str(error)) from None

    def _pieces(self, name: str, tensor: Tensor, rows: Sequence[int] = ()) -> list[Tensor]:
        """Pieces of a tensor for all ranks: of so many rows, or all alike."""
        (whole,) = self._flat(name, [tensor])
        if rows:
            row = tensor[0].numel() if len(tensor) else 0
            counts = [count * row for count in rows]
        else:
            counts = [whole.numel() // self.count] * self.count
        if sum(counts) != whole.numel():
            raise self._refused(
                name,
                f"splits {whole.numel()} elements over {self.count} ranks into {counts}",
            )
        return list(torch.split(whole, counts))

    def _operation(self, name: str, opts: Reducing, own: Sequence[Tensor]) -> Operation:
        try:
            return operation_of(opts.reduceOp, dtype_of(own) or torch.float32)
        except ValueError as error:
            raise self._refused(name, str(error)) from None

    def _require_sizes(self, name: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        if sizes(found) != sizes(wanted):
            raise self._refused(
                name, f"has tensors of {sizes(found)} elements, but should have {sizes(wanted)}"
            )

    def _refused(self, name: str, says: str) -> Refused:
        rank = self.comm.ranks[self.member]
        return Refused(says, rank=rank, group=self.comm.name, collective=name)


def sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Number of elements of each."""
    return tuple(tensor.numel() for tensor in tensors)


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype of the first, if there is one."""
    return tensors[0].dtype if tensors else None


class SimulatedGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """One rank's handle of a group whose ranks are threads.

    Args:
        name: of the group.
        comm: what its ranks share.
        member: rank of this handle, in the group.
        sent: record of this rank's collectives; extended.
    """

    def __init__(self, name: str, comm: Communicator, member: int, sent: list[Sent]) -> None:
        dist.ProcessGroup.__init__(self, member, len(comm.ranks))  # type: ignore[call-arg]
        self._name, self.comm, self.member, self.sent = name, comm, member, sent
        self.count, self._numbers = len(comm.ranks), Counter()

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name of the group."""
        return self._name

    def __repr__(self) -> str:
        return f"<rank {self.member} of {self.comm.name}>"

    def shutdown(self) -> None:
        """Nothing: a group ends with its run."""


def _not_simulated(name: str) -> Callable[..., object]:
    def refuse(self: SimulatedGroup, *args: object, **options: object) -> object:
        raise self._refused(name, "the call is not simulated")

    return refuse


for _name in (
    "recv_anysource",
    "monitored_barrier",
    "split_group",
    "merge_remote_group",
    "_start_coalescing",
    "_end_coalescing",
):
    setattr(SimulatedGroup, _name, _not_simulated(_name))
