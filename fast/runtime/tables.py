"""Pointer tables: how one launch reaches many tensors.

A table is an int64 tensor on the data's device (layout: `fast.kernels._layout`). Its contents are
a function of addresses, sizes and dtypes alone, so a table stays right for as long as those stay
the same, whichever Python objects hold the tensors; it is rebuilt when one of them changes.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from twinstep.fast.runtime.uploads import Upload, is_capturing

TensorLists = Sequence[Sequence[Tensor]]  # one list for each role, all of equal length
Key = tuple[object, ...]
Built = TypeVar("Built", "AddressTable", "TensorTable")

_reached: ContextVar[TensorLists] = ContextVar("tensors within reach", default=())


@dataclass(frozen=True, kw_only=True)
class AddressTable:
    """Addresses of 0-dim tensors, one after the other."""

    upload: Upload

    @property
    def data(self) -> Tensor:
        """The table, on the device."""
        return self.upload.data


@dataclass(frozen=True, kw_only=True)
class TensorTable(AddressTable):
    """The tensors of one dtype combination, cut into chunks."""

    tensors: int
    chunks: int
    dtypes: tuple[torch.dtype, ...]  # one for each role


class FixedTensors(list[Tensor]):
    """A list that is not changed, of tensors that stay where they are: looked at once.

    Attributes:
        facts: addresses, sizes and dtypes.
        contiguous: whether all of them are.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__(tensors)
        self.facts = _read(self)
        self.contiguous = all(tensor.is_contiguous() for tensor in self)


@dataclass(frozen=True, eq=False)
class Facts:
    """Ingredients of a table, for each tensor of a list; compared by identity."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def key(self) -> Key:
        """The same as something that is compared by value."""
        return self.addresses, self.sizes, self.dtypes


def facts_of(tensors: Sequence[Tensor]) -> Facts:
    """Return addresses, sizes and dtypes of a list."""
    return tensors.facts if isinstance(tensors, FixedTensors) else _read(tensors)


def _read(tensors: Sequence[Tensor]) -> Facts:
    return Facts(
        addresses=tuple(tensor.data_ptr() for tensor in tensors),
        sizes=tuple(tensor.numel() for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
    )


class FixedLists:
    """Lists for kernels, made anew only when memory or layout of a tensor has changed."""

    def __init__(self) -> None:
        self._places: list[Key] | None = None
        self._lists: list[FixedTensors] = []

    def of(
        self, tensors: Iterable[Tensor], make: Callable[[], Iterable[Iterable[Tensor]]]
    ) -> list[FixedTensors]:
        """Return what `make` has returned for tensors of this memory and layout.

        Args:
            tensors: whose memory the lists are views of. It is kept alive, so that nothing else
                can come to lie at the same addresses.
            make: returns the lists.
        """
        # `param.data = other` may keep the address and change the rest.
        places: list[Key] = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
        if places != self._places:
            self._lists = [FixedTensors(tensors) for tensors in make()]
            self._places = places
        return self._lists


class TableCache:
    """The most recently used tables, found by what they contain, for all threads and streams.

    Tables used while a CUDA graph is being captured are kept for good: the graph holds their
    addresses, and nothing tells us when it dies. Those built then are not found again: they hold
    nothing until their own graph has run.
    """

    def __init__(self, limit: int = 16) -> None:
        self._tables: OrderedDict[Key, Sequence[AddressTable]] = OrderedDict()
        self._captured: list[Sequence[AddressTable]] = []
        self._limit = limit
        self._lock = threading.Lock()
        self.built = 0  # how many tables were ever built: a test counts rebuilds

    def find(
        self, key: Key, device: torch.device, build: Callable[[], Sequence[Built]]
    ) -> Sequence[Built]:
        """Return the tables of this key, ready for the current stream; builds what is not known."""
        capturing = is_capturing(device)
        with self._lock:
            tables = self._tables.get(key)
            if tables is not None:
                self._tables.move_to_end(key)
        if tables is None:
            tables = build()
            with self._lock:
                self.built += 1
                if not capturing:
                    tables = self._tables.setdefault(key, tables)
                while len(self._tables) > self._limit:
                    self._tables.popitem(last=False)
        if capturing:
            self._captured.append(tables)
        else:
            for table in tables:
                table.upload.order()
        return tables  # type: ignore[return-value]  # a key begins with its kind


SHARED = TableCache()


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
    upload = Upload(torch.cat(parts), device)
    return TensorTable(upload=upload, tensors=len(sizes), chunks=len(pairs), dtypes=dtypes)


def tensor_tables(
    lists: TensorLists, *, chunk: int, cache: TableCache = SHARED, shared: bool = False
) -> Sequence[TensorTable]:
    """Return one table for every dtype combination among the tensors that are not empty.

    Args:
        lists: for each role (params, grads, ...) one tensor per slot; n-D contiguous, on one
            device, equal numel within a slot.
        chunk: elements for each program.
        cache: where tables live between calls.
        shared: give every tensor slot 0.
    """
    facts = [facts_of(role) for role in lists]
    sizes = facts[0].sizes
    if not any(sizes):
        return []
    device = lists[0][0].device

    def build() -> list[TensorTable]:
        groups: dict[tuple[torch.dtype, ...], list[int]] = {}
        for slot in filter(sizes.__getitem__, range(len(sizes))):
            groups.setdefault(tuple(role.dtypes[slot] for role in facts), []).append(slot)
        return [
            _group_table(facts, members, chunk, combination, device, shared)
            for combination, members in groups.items()
        ]

    # What is fixed is found by identity, which costs nothing; what may have moved, by address.
    fixed = [isinstance(role, FixedTensors) for role in lists]
    keys = [one if still else one.key() for one, still in zip(facts, fixed, strict=True)]
    return cache.find(("tensors", device, chunk, shared, *keys), device, build)


def _group_table(
    facts: Sequence[Facts],
    members: list[int],
    chunk: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    shared: bool,
) -> TensorTable:
    numel = torch.tensor([facts[0].sizes[slot] for slot in members])
    return build_table(
        torch.tensor([[role.addresses[slot] for slot in members] for role in facts]),
        numel,
        torch.tensor([0] * len(members) if shared else members),
        chunked=numel,
        chunk=chunk,
        dtypes=dtypes,
        device=device,
    )


def address_table(scalars: Sequence[Tensor], cache: TableCache = SHARED) -> AddressTable:
    """Return the table of the addresses of 0-dim tensors; at least one."""
    addresses = tuple(scalar.data_ptr() for scalar in scalars)
    device = scalars[0].device

    def build() -> list[AddressTable]:
        return [AddressTable(upload=Upload(torch.tensor(addresses), device))]

    return cache.find(("addresses", device, addresses), device, build)[0]


def only_slot(lists: TensorLists) -> int | None:
    """Return the slot that a flat kernel may take alone, or None where a table is needed.

    That is the one slot whose tensors are not empty, if every address in it is a multiple of 16.
    Where one is not, the compiler would give each tensor a thread layout of its own and send
    values from one to the other through shared memory; a table's element path does not.
    """
    filled = [slot for slot, size in enumerate(_sizes(lists[0])) if size]
    if len(filled) != 1 or any(role[filled[0]].data_ptr() % 16 for role in lists):
        return None
    return filled[0]


def _sizes(tensors: Sequence[Tensor]) -> Iterable[int]:
    if isinstance(tensors, FixedTensors):
        return tensors.facts.sizes
    return (tensor.numel() for tensor in tensors)


@contextlib.contextmanager
def reachable(lists: TensorLists) -> Iterator[None]:
    """Name the tensors that the launches of this thread inside reach through tables."""
    token = _reached.set((*_reached.get(), *lists))
    try:
        yield
    finally:
        _reached.reset(token)


def live_tensors() -> list[Tensor]:
    """Return the tensors that the launch of this thread may reach through its tables.

    A driver that executes kernels itself asks for them, to know which memory is in bounds.
    """
    return [tensor for tensors in _reached.get() for tensor in tensors]
