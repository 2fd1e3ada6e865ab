"""Comparisons of an optimizer with what it was at the last step, in a few passes that run in C.

Compared at every step: the parameters of each group and the tensors of their state, by identity
and by address (`tensor.data = other` keeps the identity); of each gradient whether there is one,
its dtype and whether it is contiguous. Not compared: a gradient's size and device, which torch ties
to the parameter's, and a parameter's dtype and shape where its address stays, which show in its
next gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from twinstep.fast.runtime.lists import Layout, MovingTensors

_GRAD: Callable[[object], Any] = attrgetter("grad")
_CONTIGUOUS: Callable[[Any], bool] = Tensor.is_contiguous
_ADDRESS: Callable[[Any], int] = Tensor.data_ptr
_DTYPE: Callable[[object], torch.dtype] = attrgetter("dtype")
BLOCK = 128  # tensors that are looked at in every respect before the next ones: they are in caches


def gradient(param: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert param.grad is not None
    return param.grad


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return where tensors lie."""
    return list(map(_ADDRESS, tensors))


def same(tensors: Iterable[object], before: Iterable[object]) -> bool:
    """Return True if two collections of one length hold the same objects."""
    return all(map(is_, tensors, before))


@dataclass(frozen=True)
class Found:
    """Gradients of a step and their addresses."""

    grads: list[Tensor]
    addresses: list[int]

    def moving(self, places: slice | list[int], layout: Layout | None) -> list[Tensor]:
        """Those at some places, for kernels; without a layout they are not contiguous."""
        if isinstance(places, slice):
            grads, addresses = self.grads, self.addresses
            if places != slice(0, len(grads)):
                grads, addresses = grads[places], addresses[places]
        else:
            grads = [self.grads[place] for place in places]
            addresses = [self.addresses[place] for place in places]
        return grads if layout is None else MovingTensors(grads, addresses, layout)


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
        self._absent = [p for p, grad in zip(params, grads, strict=True) if grad is None]
        found = [grad for grad in grads if grad is not None]
        self.contiguous = [grad.is_contiguous() for grad in found]
        columns = (
            self.params,
            addresses_of(self.params),
            [grad.dtype for grad in found],
            self.contiguous,
        )
        self._blocks = [
            tuple(column[start : start + BLOCK] for column in columns)
            for start in range(0, len(found), BLOCK)
        ]
        self._places = addresses_of(self._absent)
        self._empty = addresses_of(found).count(0)

    def read(self) -> Found | None:
        """Return the gradients; None where anything but their addresses has changed."""
        grads: list[Tensor] = []
        addresses: list[int] = []
        if not all(map(is_, map(_GRAD, self._absent), repeat(None))):
            return None
        try:
            if addresses_of(self._absent) != self._places:
                return None
            for params, places, dtypes, contiguous in self._blocks:
                block = list(map(_GRAD, params))
                if (
                    list(map(_DTYPE, block)) != dtypes
                    or list(map(_CONTIGUOUS, block)) != contiguous
                    or list(map(_ADDRESS, params)) != places
                ):
                    return None
                grads += block
                addresses += map(_ADDRESS, block)
        except (AttributeError, TypeError, RuntimeError):  # None, or nothing dense
            return None
        if addresses.count(0) != self._empty:
            return None  # a tensor around others has no address of its own
        return Found(grads, addresses)


class StateWatch:
    """State of parameters as it was: dicts, and the tensors in them, by identity and address.

    Args:
        state: of an optimizer, by parameter.
        names: of the entries that matter; dicts that lack one of them do not.
    """

    def __init__(self, state: Mapping[Tensor, Mapping[str, Tensor]], names: Sequence[str]) -> None:
        self._keys, self._all = list(state), list(state.values())
        self._dicts = [held for held in self._all if all(name in held for name in names)]
        self._columns = []
        for name in names:
            column = [held[name] for held in self._dicts]
            self._columns.append((name, column, addresses_of(column)))

    def holds(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> bool:
        """Return True if nothing was replaced."""
        if len(state) != len(self._keys):
            return False
        if not (same(state, self._keys) and same(state.values(), self._all)):
            return False
        try:
            for name, column, places in self._columns:
                if not same(map(itemgetter(name), self._dicts), column):
                    return False
                if addresses_of(column) != places:
                    return False
        except KeyError:
            return False
        return True
