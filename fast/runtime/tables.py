"""Pointer tables: how one launch reaches many tensors.

A table is an int64 tensor on the data's device (layout: `fast.kernels._layout`). Its contents are
a function of addresses, sizes and dtypes alone, so a table stays right for as long as those stay
the same, whichever Python objects hold the tensors; it is rebuilt when one of them changes.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from twinstep.fast.runtime.lists import (
    Facts,
    FixedTensors,
    Key,
    MovingTensors,
    address_at,
    facts_of,
    filled_slots,
)
from twinstep.fast.runtime.recorder import note_table
from twinstep.fast.runtime.uploads import RenewedUpload, Upload, is_capturing

TensorLists = Sequence[Sequence[Tensor]]  # one list for each role, all of equal length
Built = TypeVar("Built", "AddressTable", "TensorTable", "MovingTable")

FEW, MOST_WORDS = 8, 2**23  # past 64 MiB a cache keeps this many keys

_reached: ContextVar[TensorLists] = ContextVar("tensors within reach", default=())


@dataclass(eq=False, kw_only=True)
class AddressTable:
    """Addresses of 0-dim tensors, one after the other."""

    upload: Upload

    @property
    def data(self) -> Tensor:
        """The table, on the device."""
        return self.upload.data


@dataclass(eq=False, kw_only=True)
class TensorTable(AddressTable):
    """The tensors of one dtype combination, cut into chunks."""

    tensors: int
    chunks: int
    dtypes: tuple[torch.dtype, ...]  # one for each role


@dataclass(eq=False, kw_only=True)
class MovingTable(TensorTable):
    """A table of which one row of addresses is written again when its tensors have moved.

    Attributes:
        row: that moves.
        slots: of the tensors in the caller's lists.
        aligned: of each tensor, 1 if its other addresses are multiples of 16.
        now: addresses of all of the caller's tensors, as the row has them.
        crooked: whether one of them is no multiple of 16.
    """

    row: int
    slots: list[int]
    aligned: Tensor
    now: array[int] = field(default_factory=lambda: array("q"))
    crooked: bool = False

    def move(self, tensors: MovingTensors) -> None:
        """Write the addresses that the tensors have now, unless they have not moved."""
        if tensors.addresses == self.now:
            return
        upload, words = cast(RenewedUpload, self.upload), tensors.words
        if len(tensors) != self.tensors:
            words = words[self.slots]
        upload.renew(self.row * self.tensors, words)
        before, self.crooked = self.crooked, tensors.crooked
        if before or self.crooked:
            aligned = self.aligned * (words & 15 == 0)
            upload.renew((len(self.dtypes) + 1) * self.tensors, aligned)
        self.now = tensors.addresses


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
                while self._overfull():
                    self._tables.popitem(last=False)
        if capturing:
            self._captured.append(tables)
        else:
            for table in tables:
                table.upload.order()
        return tables  # type: ignore[return-value]  # a key begins with its kind

    def _overfull(self) -> bool:
        kept = len(self._tables)
        words = sum(table.data.numel() for tables in self._tables.values() for table in tables)
        return kept > self._limit or (kept > FEW and words > MOST_WORDS)

    def retire(self, key: Key, fits: Callable[[MovingTable], bool]) -> Sequence[MovingTable] | None:
        """Give tables to the graph that is being captured, for good; None if they do not fit."""
        with self._lock:
            tables = cast("Sequence[MovingTable] | None", self._tables.get(key))
            if tables is None or not all(map(fits, tables)):
                return None
            self._captured.append(self._tables.pop(key))
        return tables


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
    if not filled_slots(lists[0]):
        return []
    tables = _moving_tables(lists, chunk, cache, shared)
    if tables is not None:
        return tables
    note_table(lists)
    fixed = [isinstance(role, FixedTensors) for role in lists]
    facts, device = [facts_of(role) for role in lists], lists[0][0].device
    # What is fixed is found by identity, which costs nothing; what may have moved, by address.
    keys = [one if still else one.key() for one, still in zip(facts, fixed, strict=True)]

    def build() -> list[TensorTable]:
        return [
            _group_table(facts, members, chunk, combination, device, shared)
            for combination, members in _combinations(facts).items()
        ]

    return cache.find(("tensors", device, chunk, shared, *keys), device, build)


def _combinations(facts: Sequence[Facts]) -> dict[tuple[torch.dtype, ...], list[int]]:
    """Slots of tensors that are not empty, by the dtypes of all roles."""
    found: dict[tuple[torch.dtype, ...], list[int]] = {}
    sizes = facts[0].sizes
    for slot in filter(sizes.__getitem__, range(len(sizes))):
        found.setdefault(tuple(role.dtypes[slot] for role in facts), []).append(slot)
    return found


def _moving_tables(
    lists: TensorLists, chunk: int, cache: TableCache, shared: bool
) -> Sequence[MovingTable] | None:
    """Tables that are found by identity, with the addresses of now.

    None where not exactly one list moves, or another is not fixed, and for what a graph has not.
    """
    identities: list[object] = []
    moving, row = None, 0
    for place, role in enumerate(lists):
        if isinstance(role, FixedTensors):
            identities.append(role.facts)
        elif isinstance(role, MovingTensors) and moving is None:
            moving, row = role, place
            identities.append(role.layout)
        else:
            return None
    if moving is None:
        return None
    device = lists[0][0].device
    key = ("moving", device, chunk, shared, *identities)
    if is_capturing(device):
        addresses = moving.addresses
        # A graph keeps what it reads: tables of these very addresses, which then move no more.
        return cache.retire(key, lambda table: table.now == addresses)

    def build() -> list[MovingTable]:
        facts = [facts_of(role) for role in lists]
        return [
            _moving_table(facts, row, members, chunk, combination, device, shared)
            for combination, members in _combinations(facts).items()
        ]

    tables = cache.find(key, device, build)
    for table in tables:
        table.move(moving)
        note_table(lists, table)
    return tables


def _moving_table(
    facts: Sequence[Facts],
    row: int,
    members: list[int],
    chunk: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    shared: bool,
) -> MovingTable:
    table = _group_table(facts, members, chunk, dtypes, torch.device("cpu"), shared)
    count = len(members)
    others = [role for place, role in enumerate(facts) if place != row]
    crooked = [any(role.addresses[slot] % 16 for role in others) for slot in members]
    moving = [facts[row].addresses[slot] % 16 for slot in members]
    return MovingTable(
        upload=RenewedUpload(table.data, device, count),
        tensors=count,
        chunks=table.chunks,
        dtypes=dtypes,
        row=row,
        slots=members,
        aligned=1 - torch.tensor(crooked, dtype=torch.int64),
        now=array("q", facts[row].addresses),
        crooked=any(moving),
    )


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
    facts, device = facts_of(scalars), scalars[0].device
    note_table([scalars])

    def build() -> list[AddressTable]:
        return [AddressTable(upload=Upload(torch.tensor(facts.addresses), device))]

    key = facts if isinstance(scalars, FixedTensors) else facts.addresses
    return cache.find(("addresses", device, key), device, build)[0]


def only_slot(lists: TensorLists) -> int | None:
    """Return the slot that a flat kernel may take alone, or None where a table is needed.

    That is the one slot whose tensors are not empty, if every address in it is a multiple of 16.
    Where one is not, the compiler would give each tensor a thread layout of its own and send
    values from one to the other through shared memory; a table's element path does not.
    """
    filled = filled_slots(lists[0])
    if len(filled) != 1:
        return None
    slot = filled[0]
    for role in lists:
        if address_at(role, slot) % 16:
            return None
    return slot


class reachable:  # noqa: N801  # a context; a generator costs more than a launch
    """Name the tensors that the launches of this thread inside reach through tables."""

    def __init__(self, lists: TensorLists) -> None:
        self._lists = lists

    def __enter__(self) -> None:
        self._token = _reached.set((*_reached.get(), *self._lists))

    def __exit__(self, *_: object) -> None:
        _reached.reset(self._token)


def live_tensors() -> list[Tensor]:
    """Return the tensors that the launch of this thread may reach through its tables.

    A driver that executes kernels itself asks for them, to know which memory is in bounds.
    """
    return [tensor for tensors in _reached.get() for tensor in tensors]
