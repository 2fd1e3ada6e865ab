"""Lists of tensors whose ingredients of a pointer table are known from before."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

Key = tuple[object, ...]
EVEN = bytes(range(0, 256, 16))
LOWEST = 0 if sys.byteorder == "little" else 7


class Layout:
    """Sizes and dtypes of a list of contiguous tensors; compared by identity."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.sizes = tuple(tensor.numel() for tensor in tensors)
        self.dtypes = tuple(tensor.dtype for tensor in tensors)
        self.filled = [slot for slot, size in enumerate(self.sizes) if size]


class MovingTensors(Sequence[Tensor]):
    """Contiguous tensors of a known layout.

    Args:
        tensors: may be looked up only when one of them is asked for.
        addresses: where they lie now; another array takes its place where they move.
        layout: of them, wherever they are.
    """

    def __init__(self, tensors: Sequence[Tensor], addresses: array[int], layout: Layout) -> None:
        self._tensors = tensors
        self.addresses, self.layout = addresses, layout

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self.addresses)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        return self._tensors[place]

    @property
    def words(self) -> Tensor:
        """The addresses as an int64 tensor."""
        return torch.frombuffer(self.addresses, dtype=torch.int64)

    @property
    def crooked(self) -> bool:
        """True if an address is no multiple of 16."""
        # The lowest byte of each: what is left without multiples of 16.
        return bool(
            self.addresses.tobytes()[LOWEST :: self.addresses.itemsize].translate(None, EVEN)
        )


class FixedTensors(list[Tensor]):
    """A list that is not changed, of tensors that stay where they are: looked at once.

    Attributes:
        facts: addresses, sizes and dtypes.
        contiguous: whether all of them are.
        filled: slots of those that are not empty.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__(tensors)
        self.facts = _read(self)
        self.contiguous = all(tensor.is_contiguous() for tensor in self)
        self.filled = [slot for slot, size in enumerate(self.facts.sizes) if size]


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
    if isinstance(tensors, MovingTensors):
        layout = tensors.layout
        return Facts(tuple(tensors.addresses), layout.sizes, layout.dtypes)
    return tensors.facts if isinstance(tensors, FixedTensors) else _read(tensors)


def address_at(tensors: Sequence[Tensor], slot: int) -> int:
    """Address of one tensor of a list."""
    if isinstance(tensors, MovingTensors):
        return tensors.addresses[slot]
    return tensors[slot].data_ptr()


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
        places = _places(tensors)
        if places != self._places:
            self._lists = [FixedTensors(each) for each in make()]
        self._places = places
        return self._lists


def _places(tensors: Iterable[Tensor]) -> list[Key]:
    # `param.data = other` may keep the address and change the rest.
    return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]


def filled_slots(tensors: Sequence[Tensor]) -> list[int]:
    """Slots of tensors that are not empty."""
    if isinstance(tensors, FixedTensors):
        return tensors.filled
    if isinstance(tensors, MovingTensors):
        return tensors.layout.filled
    return [slot for slot, tensor in enumerate(tensors) if tensor.numel()]
