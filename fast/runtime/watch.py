"""Comparisons of an optimizer with what it was at the last step, in a few passes that run in C.

Compared at every step: the parameters of each group and the tensors of their state, by identity
and by address (`tensor.data = other` keeps the identity); of each gradient whether there is one,
its dtype and whether it is contiguous. Not compared: a gradient's size and device, which torch ties
to the parameter's, and a parameter's dtype and shape where its address stays, which show in its
next gradient.

Long lists are read by `fast.runtime.reader`, where that can be built. Its yes is a yes of Python's
as well; where it says no Python looks again, and decides.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, overload

import torch
from torch import Tensor

from twinstep.contract.tensors import drop_gradients
from twinstep.fast.runtime.lists import Layout, MovingTensors
from twinstep.fast.runtime.reader import LONG, Reader, library, reader_of

_GRAD: Callable[[object], Any] = attrgetter("grad")
_CONTIGUOUS: Callable[[Any], bool] = Tensor.is_contiguous
_ADDRESS: Callable[[Any], int] = Tensor.data_ptr
_DTYPE: Callable[[object], torch.dtype] = attrgetter("dtype")
BLOCK = 128  # tensors that are looked at in every respect before the next ones: they are in caches


def gradient(param: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert param.grad is not None
    return param.grad


def addresses_of(tensors: Iterable[Tensor]) -> array[int]:
    """Return where tensors lie."""
    return array("q", map(_ADDRESS, tensors))


def same(found: Sequence[object], before: Sequence[object]) -> bool:
    """Return True if two sequences hold the same objects."""
    if len(found) != len(before):
        return False
    if len(found) >= LONG and type(found) is type(before) is list:
        reader = library()
        if reader is not None:
            return reader.same_objects(found, before)
    return all(map(is_, found, before))


class Placed:
    """Tensors that should stay where they are.

    Args:
        tensors: a list that is not changed.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.places = tensors, addresses_of(tensors)
        self._reader = reader_of(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def holds(self) -> bool:
        """Return True while they do."""
        if self._reader is not None and self._reader.where_they_were(self.tensors, self.places):
            return True
        return addresses_of(self.tensors) == self.places


class Grads(Sequence[Tensor]):
    """Gradients of parameters that have one, looked up when they are asked for.

    Args:
        params: all of them.
        places: of those that are meant.
    """

    def __init__(self, params: Sequence[Tensor], places: slice | list[int]) -> None:
        self._params, self._places = params, places
        self._found: list[Tensor] | None = None

    def _all(self) -> list[Tensor]:
        if self._found is None:
            chosen = self._places
            params = (
                self._params[chosen]
                if isinstance(chosen, slice)
                else map(self._params.__getitem__, chosen)
            )
            self._found = list(map(gradient, params))
        return self._found

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all())

    def __len__(self) -> int:
        if isinstance(self._places, slice):
            return len(range(*self._places.indices(len(self._params))))
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, int) and isinstance(self._places, slice) and self._found is None:
            return gradient(self._params[range(*self._places.indices(len(self._params)))[place]])
        return self._all()[place]


@dataclass(eq=False)
class Found:
    """Gradients of a step: the parameters that have them, and their addresses."""

    params: list[Tensor]
    addresses: array[int]

    def moving(self, places: slice | list[int], layout: Layout | None) -> Sequence[Tensor]:
        """Those at some places, for kernels; without a layout they are not contiguous."""
        grads = Grads(self.params, places)
        if layout is None:
            return list(grads)
        if isinstance(places, list):
            addresses = array("q", map(self.addresses.__getitem__, places))
        elif places == slice(0, len(self.params)):
            addresses = self.addresses
        else:
            addresses = self.addresses[places]
        return MovingTensors(grads, addresses, layout)


class GradientReader:
    """The gradients of a list of parameters, read in a few passes that run in C.

    Args:
        params: those that have a gradient now are expected to have one again, with its dtype and
            contiguous or not as it is; the others to have none. Gradients are not around others.

    Attributes:
        params: that have a gradient.
        contiguous: of each of them, whether its gradient is.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        grads = [param.grad for param in params]
        self.params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        absent = [p for p, grad in zip(params, grads, strict=True) if grad is None]
        found = [grad for grad in grads if grad is not None]
        self.contiguous = [grad.is_contiguous() for grad in found]
        self._dtypes = [grad.dtype for grad in found]
        self._places, self._absent = addresses_of(self.params), Placed(absent)
        self._empty = addresses_of(found).count(0)
        self._reader = reader_of(self.params, absent)
        self._kinds: array[int] | None = None

    def read(self) -> Found | None:
        """Return the gradients; None where anything but their addresses has changed."""
        reader, absent = self._reader, self._absent.tensors
        addresses = None
        if reader is None:
            if not all(map(is_, map(_GRAD, absent), repeat(None))):
                return None
        elif not reader.without_gradients(absent):
            return None
        if not self._absent.holds():
            return None
        if reader is not None and self._kinds is not None:
            addresses = reader.gradients(self.params, self._places, self._kinds)
        if addresses is None:
            addresses = self._read_by_python()
            if addresses is not None and reader is not None:
                self._kinds = reader.kinds_of_gradients(self.params, self._places, addresses)
        return None if addresses is None else Found(self.params, addresses)

    def _read_by_python(self) -> array[int] | None:
        addresses = array("q")
        try:
            for start in range(0, len(self.params), BLOCK):
                end = start + BLOCK
                params = self.params[start:end]
                block = list(map(_GRAD, params))
                if (
                    list(map(_DTYPE, block)) != self._dtypes[start:end]
                    or list(map(_CONTIGUOUS, block)) != self.contiguous[start:end]
                    or addresses_of(params) != self._places[start:end]
                ):
                    return None
                addresses.extend(map(_ADDRESS, block))
        except (AttributeError, TypeError, RuntimeError):  # None, or nothing dense
            return None
        # A tensor around others has no address of its own.
        return addresses if addresses.count(0) == self._empty else None

    def drop(self) -> None:
        """Drop the gradients."""
        if self._reader is None:
            drop_gradients(self.params, set_to_none=True)
        else:
            self._reader.drop(self.params)

    def noted(self) -> NotedGradients:
        """Remember which tensors the gradients are."""
        return NotedGradients(self.params, self._reader)


class NotedGradients:
    """Gradients of parameters, as objects; they are not kept alive.

    Args:
        params: a list that is not changed.
        reader: in C++, or None.
    """

    def __init__(self, params: list[Tensor], reader: Reader | None = None) -> None:
        self._params, self._reader = params, reader
        if reader is not None:
            self._notes = reader.note(params)
        else:
            grads = map(_GRAD, params)
            self._weak = [None if grad is None else weakref.ref(grad) for grad in grads]

    def still(self) -> list[Tensor]:
        """Parameters that still have the gradient that they had."""
        if self._reader is not None:
            return self._reader.still_noted(self._notes, self._params)
        pairs = zip(self._params, self._weak, strict=True)
        return [param for param, weak in pairs if weak is not None and _holds(param, weak)]


def _holds(param: Tensor, grad: weakref.ref[Tensor]) -> bool:
    """Whether this is still the gradient of a parameter."""
    found = grad()
    if found is None:
        return False
    # A tensor that C++ alone had kept alive is Python's again.
    found._fix_weakref()  # type: ignore[attr-defined]
    return param.grad is found


class StateWatch:
    """State of parameters as it was: dicts, and the tensors in them, by identity and address.

    Args:
        state: of an optimizer, by parameter.
        names: of the entries that matter; dicts that lack one of them do not.
    """

    def __init__(self, state: Mapping[Tensor, Mapping[str, Tensor]], names: Sequence[str]) -> None:
        self._keys: list[object] = list(state)
        self._values: list[object] = list(state.values())
        self._names = tuple(names)
        self._dicts = [held for held in state.values() if all(name in held for name in names)]
        self._tensors = Placed([held[name] for name in names for held in self._dicts])
        plain = isinstance(state, dict) and all(type(held) is dict for held in self._dicts)
        self._reader = reader_of(self._tensors.tensors) if plain else None

    def holds(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> bool:
        """Return True if nothing was replaced."""
        if len(state) != len(self._keys):
            return False
        reader = self._reader
        if reader is not None and isinstance(state, dict):
            if not reader.same_items(state, self._keys, self._values):
                return False
            if not reader.same_entries(self._dicts, self._names, self._tensors.tensors):
                return False
            return self._tensors.holds()
        return (
            all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._values))
            and self._same_entries()
            and self._tensors.holds()
        )

    def _same_entries(self) -> bool:
        columns = (map(itemgetter(name), self._dicts) for name in self._names)
        try:
            return all(map(is_, chain.from_iterable(columns), self._tensors.tensors))
        except KeyError:
            return False
