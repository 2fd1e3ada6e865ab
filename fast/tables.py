"""Pointer tables: how one launch reaches many tensors.

A table is an int64 tensor on the data's device (layout: `fast.kernels._layout`). Its contents are
a function of addresses, sizes and dtypes alone, so a table stays right for as long as those stay
the same, whichever Python objects hold the tensors; it is rebuilt when one of them changes.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

TensorLists = Sequence[Sequence[Tensor]]  # one list for each role, all of equal length
Key = tuple[object, ...]
Built = TypeVar("Built", "StepTable", "list[TensorTable]")

_reached: list[Sequence[Tensor]] = []


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """The tensors of one dtype combination, cut into chunks.

    `host` is the staging copy; the asynchronous upload, or a captured graph that repeats it, reads
    it later than the call that made it.
    """

    data: Tensor
    host: Tensor
    tensors: int
    chunks: int
    dtypes: tuple[torch.dtype, ...]  # one for each role


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Addresses of 0-dim int64 step counters."""

    data: Tensor
    host: Tensor
    tensors: int


class TableCache:
    """The most recently used tables, found by what they contain.

    Tables used while a CUDA graph is being captured are kept for good: the graph holds their
    addresses, and nothing tells us when it dies.
    """

    def __init__(self, limit: int = 16) -> None:
        self._tables: OrderedDict[Key, StepTable | list[TensorTable]] = OrderedDict()
        self._captured: list[StepTable | list[TensorTable]] = []
        self._limit = limit
        self.built = 0  # how many tables were ever built: a test counts rebuilds

    def find(self, key: Key, device: torch.device, build: Callable[[], Built]) -> Built:
        """Return the table of this key, building it where it is not known."""
        table = self._tables.get(key)
        if table is None:
            table = build()
            self.built += 1
            self._tables[key] = table
        self._tables.move_to_end(key)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(table)
        while len(self._tables) > self._limit:
            self._tables.popitem(last=False)
        return table  # type: ignore[return-value]  # a key begins with its kind


SHARED = TableCache()


def upload(host: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (staging copy, device copy) of a CPU tensor, without waiting for a GPU."""
    if device.type != "cuda":
        return host, host
    pinned = host.pin_memory()
    return pinned, pinned.to(device, non_blocking=True)


def chunk_pairs(sizes: Tensor, chunk: int) -> Tensor:
    """Return the pairs (tensor, chunk within the tensor) that cover tensors of these sizes.

    >>> chunk_pairs(torch.tensor([3, 0, 5]), 4).tolist()
    [[0, 0], [2, 0], [2, 1]]
    """
    counts = (sizes + (chunk - 1)) // chunk
    ends = counts.cumsum(0)
    chunks = torch.arange(int(counts.sum()))
    # The first tensor whose chunks end behind a chunk owns it; empty ones never do.
    tensors = torch.searchsorted(ends, chunks, right=True)
    return torch.stack((tensors, chunks - (ends - counts)[tensors]), dim=1)


def build_table(
    rows: Tensor,
    sizes: Tensor,
    extra: Tensor,
    *,
    chunked: Tensor,
    chunk: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> TensorTable:
    """Lay out one table.

    Args:
        rows: int64 (depth, tensors), addresses.
        sizes: int64 (tensors,), the `numel` row.
        extra: int64 (tensors,), the `slot` row.
        chunked: int64 (tensors,), how many elements chunks must cover.
        chunk: elements for each program.
        dtypes: one for each address row.
        device: where kernels will read the table.
    """
    aligned = ((rows % 16) == 0).all(dim=0).to(torch.int64)
    pairs = chunk_pairs(chunked, chunk)
    parts = (rows.reshape(-1), sizes, aligned, extra, pairs.reshape(-1))
    host, data = upload(torch.cat(parts), device)
    return TensorTable(data=data, host=host, tensors=len(sizes), chunks=len(pairs), dtypes=dtypes)


def tensor_tables(
    lists: TensorLists, *, chunk: int, cache: TableCache = SHARED, shared: bool = False
) -> list[TensorTable]:
    """Return one table for every dtype combination among the tensors that are not empty.

    Args:
        lists: for each role (params, grads, ...) one tensor per slot; n-D contiguous, on one
            device, equal numel within a slot.
        chunk: elements for each program.
        cache: where tables live between calls.
        shared: give every tensor slot 0.
    """
    slots = [slot for slot, tensor in enumerate(lists[0]) if tensor.numel()]
    if not slots:
        return []
    device = lists[0][slots[0]].device
    sizes = tuple(tensor.numel() for tensor in lists[0])
    addresses = tuple(tuple(tensor.data_ptr() for tensor in role) for role in lists)
    dtypes = tuple(tuple(tensor.dtype for tensor in role) for role in lists)

    def build() -> list[TensorTable]:
        groups: dict[tuple[torch.dtype, ...], list[int]] = {}
        for slot in slots:
            groups.setdefault(tuple(role[slot] for role in dtypes), []).append(slot)
        return [
            _group_table(addresses, sizes, members, chunk, combination, device, shared)
            for combination, members in groups.items()
        ]

    key = ("tensors", device, chunk, shared, sizes, addresses, dtypes)
    return cache.find(key, device, build)


def _group_table(
    addresses: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    members: list[int],
    chunk: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    shared: bool,
) -> TensorTable:
    numel = torch.tensor([sizes[slot] for slot in members])
    return build_table(
        torch.tensor([[role[slot] for slot in members] for role in addresses]),
        numel,
        torch.tensor([0] * len(members) if shared else members),
        chunked=numel,
        chunk=chunk,
        dtypes=dtypes,
        device=device,
    )


def step_table(steps: Sequence[Tensor], cache: TableCache = SHARED) -> StepTable:
    """Return the table of step counters' addresses; at least one counter."""
    device = steps[0].device
    addresses = tuple(step.data_ptr() for step in steps)

    def build() -> StepTable:
        host, data = upload(torch.tensor(addresses), device)
        return StepTable(data=data, host=host, tensors=len(addresses))

    return cache.find(("steps", device, addresses), device, build)


def only_slot(lists: TensorLists) -> int | None:
    """Return the slot that a flat kernel may take alone, or None where a table is needed.

    That is the one slot whose tensors are not empty, if every address in it is a multiple of 16.
    Where one is not, the compiler would give each tensor a thread layout of its own and send
    values from one to the other through shared memory; a table's element path does not.
    """
    filled = [slot for slot, tensor in enumerate(lists[0]) if tensor.numel()]
    if len(filled) != 1 or any(role[filled[0]].data_ptr() % 16 for role in lists):
        return None
    return filled[0]


@contextlib.contextmanager
def reachable(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Name the tensors that the launches inside reach through tables."""
    _reached.append(tensors)
    try:
        yield
    finally:
        _reached.pop()


def live_tensors() -> list[Tensor]:
    """Return the tensors that the launch in progress may reach through its tables.

    A driver that executes kernels itself asks for them, to know which memory is in bounds.
    """
    return [tensor for tensors in _reached for tensor in tensors]
