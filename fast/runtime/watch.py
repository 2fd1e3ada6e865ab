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
    count = len(found)
    if count != len(before):
        return False
    if count >= LONG and type(found) is type(before) is list:
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
    """Gradients of parameters, looked up whenever they are asked for; none is kept.

    Args:
        params: that have a gradient; None where there is a tensor in its place.
        others: those tensors; None where there is a parameter.
    """

    def __init__(self, params: list[Tensor | None], others: list[Tensor | None]) -> None:
        self._params, self._others = params, others

    def __iter__(self) -> Iterator[Tensor]:
        return map(_gradient_or, self._params, self._others)

    def __len__(self) -> int:
        return len(self._params)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, slice):
            return Grads(self._params[place], self._others[place])
        return _gradient_or(self._params[place], self._others[place])


def _gradient_or(param: Tensor | None, other: Tensor | None) -> Tensor:
    found = other if param is None else param.grad
    assert found is not None
    return found


class GradientReader:
    """The gradients of a list of parameters, read in a few passes that run in C.

    Args:
        params: those that have a gradient now are expected to have one again, with its dtype and
            contiguous or not as it is; the others to have none. Gradients are not around others.

    Attributes:
        params: that have a gradient.
        contiguous: of each of them, whether its gradient is.
        addresses: of the gradients that were read last; another array for each step.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        grads = [param.grad for param in params]
        self.params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        absent = [p for p, grad in zip(params, grads, strict=True) if grad is None]
        found = [grad for grad in grads if grad is not None]
        self.contiguous = [grad.is_contiguous() for grad in found]
        dtypes = [grad.dtype for grad in found]
        self._places, self._absent = addresses_of(self.params), Placed(absent)
        parts = [slice(at, at + BLOCK) for at in range(0, len(found), BLOCK)]
        self._blocks = [
            (self.params[part], dtypes[part], self.contiguous[part], self._places[part])
            for part in parts
        ]
        self.addresses = addresses_of(found)
        self._empty = self.addresses.count(0)
        self._reader = reader_of(self.params, absent)
        self._kinds: array[int] | None = None
        self._lists: list[tuple[MovingTensors, slice | list[int] | None, array[int]]] = []

    def moving(
        self, places: slice | list[int], layout: Layout | None, others: Sequence[Tensor] = ()
    ) -> Sequence[Tensor]:
        """A list of the gradients at some places, for kernels; it follows what is read.

        Args:
            places: among the gradients, with the others behind them.
            layout: None where a gradient is not contiguous.
            others: tensors that stay where they are.
        """
        params: list[Tensor | None] = [*self.params, *repeat(None, len(others))]
        beside: list[Tensor | None] = [*repeat(None, len(self.params)), *others]
        every = range(len(params))
        chosen = list(every[places]) if isinstance(places, slice) else places
        grads = Grads([params[place] for place in chosen], [beside[place] for place in chosen])
        if layout is None:
            return grads
        found = MovingTensors(grads, self.addresses, layout)
        whole = not others and chosen == list(every)
        self._lists.append((found, None if whole else places, addresses_of(others)))
        self._move()
        return found

    def _move(self) -> None:
        """Tell the lists where gradients lie now."""
        for moving, places, others in self._lists:
            if places is None:
                moving.addresses = self.addresses
                continue
            addresses = self.addresses + others if others else self.addresses
            if isinstance(places, list):
                moving.addresses = array("q", map(addresses.__getitem__, places))
            else:
                moving.addresses = addresses[places]

    def read(self) -> bool:
        """Read the gradients; False where anything but their addresses has changed."""
        reader = self._reader
        if self._absent and not self._still_absent():
            return False
        addresses = None
        if reader is not None and self._kinds is not None:
            addresses = reader.gradients(self.params, self._places, self._kinds)
        if addresses is None:
            addresses = self._read_by_python()
            if addresses is None:
                return False
            if reader is not None:
                self._kinds = reader.kinds_of_gradients(self.params, self._places, addresses)
        self.addresses = addresses
        self._move()
        return True

    def _still_absent(self) -> bool:
        """Whether parameters that had no gradient have none, and lie where they did."""
        absent = self._absent.tensors
        if self._reader is None:
            none = all(map(is_, map(_GRAD, absent), repeat(None)))
        else:
            none = self._reader.without_gradients(absent)
        return none and self._absent.holds()

    def _read_by_python(self) -> array[int] | None:
        addresses = array("q")
        try:
            for params, dtypes, contiguous, places in self._blocks:
                block = list(map(_GRAD, params))
                if (
                    list(map(_DTYPE, block)) != dtypes
                    or list(map(_CONTIGUOUS, block)) != contiguous
                    or addresses_of(params) != places
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
        names: of the entries that matter, two or more; dicts that lack one of them do not.
    """

    def __init__(self, state: Mapping[Tensor, Mapping[str, Tensor]], names: Sequence[str]) -> None:
        self._keys: list[object] = list(state)
        self._values: list[object] = list(state.values())
        self._names = tuple(names)
        self._dicts = [held for held in state.values() if all(name in held for name in names)]
        self._entries: Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]] = itemgetter(*names)
        self._tensors = Placed(list(chain.from_iterable(map(self._entries, self._dicts))))
        plain = isinstance(state, dict) and all(type(held) is dict for held in self._dicts)
        self._reader = reader_of(self._tensors.tensors) if plain else None

    def holds(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> bool:
        """Return True if nothing was replaced."""
        if len(state) != len(self._keys):
            return False
        if not self._keys:
            return True
        reader = self._reader
        if reader is not None and isinstance(state, dict):
            if not reader.same_items(state, self._keys, self._values):
                return False
            if not reader.same_entries(self._dicts, self._names, self._tensors.tensors):
                return False
            return self._tensors.holds()
        try:
            found = chain.from_iterable(map(self._entries, self._dicts))
            return (
                all(map(is_, state, self._keys))
                and all(map(is_, state.values(), self._values))
                and all(map(is_, found, self._tensors.tensors))
                and self._tensors.holds()
            )
        except KeyError:
            return False
