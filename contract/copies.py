"""Copies and pickles of an optimizer around another one, and the hooks of its state dicts.

Model weights may be views of memory that the optimizer has laid out, and masters are those of its
inner optimizer, so that a copy attribute by attribute would step memory of nobody. An optimizer is
taken apart into what it was built from and its state dict, and built again around the copies of
its parameters.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from twinstep.contract.moments import StateDict
from twinstep.contract.parallel import Groups

Options = Mapping[str, object]
_RUNNING: ContextVar[frozenset[tuple[int, str]]] = ContextVar("running", default=frozenset())


class Rebuilt(Protocol):
    """An optimizer around another one, as it is taken apart and built again."""

    _built_with: Callable[[], Options]

    @property
    def ranks(self) -> Groups:
        """Process groups of all ranks that construct alike."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""

    def state_dict(self) -> StateDict:
        """Everything but the arguments."""

    def _enter_copied(self, state: object, kept: Options) -> None:
        """Take over the state of the optimizer that this one is a copy of."""


Parts = tuple[type[Rebuilt], torch.optim.Optimizer, Options, Options]


def parts_of(optimizer: Rebuilt, groups: list[list[Tensor]], kept: Options) -> Parts:
    """Class, inner optimizer, arguments and state of an optimizer, to build it again.

    Args:
        optimizer: without process groups.
        groups: its trained parameters.
        kept: attributes that no state dict has.

    Raises:
        TypeError: it has process groups.
    """
    if optimizer.ranks:
        raise TypeError(
            "an optimizer over process groups was copied or pickled, but should be saved by its "
            f"state_dict() and built again by each rank [{type(optimizer).__name__}]"
        )
    inner = copy.copy(optimizer.optimizer)
    inner.state = defaultdict(dict)
    inner.param_groups = [
        {**group, "params": params}
        for group, params in zip(optimizer.optimizer.param_groups, groups, strict=True)
    ]
    state = optimizer.state_dict()
    return type(optimizer), inner, optimizer._built_with(), {"state": state, "kept": kept}


def rebuilt(
    kind: Callable[..., Rebuilt], inner: torch.optim.Optimizer, options: Options, found: Options
) -> Rebuilt:
    """An optimizer from its parts; model weights keep their values."""
    params = list(chain.from_iterable(group["params"] for group in inner.param_groups))
    weights = [param.detach().clone() for param in params]
    # A parameter that was frozen later has its master still.
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_()
    made = kind(inner, **options)
    for param in frozen:
        param.requires_grad_(False)
    made._enter_copied(found["state"], cast(Options, found["kept"]))
    for param, weight in zip(params, weights, strict=True):
        param.detach().copy_(weight)
    return made


def saving_with_hooks(save: Callable[..., StateDict]) -> Callable[..., StateDict]:
    """A `state_dict` that calls the hooks of torch's, once where an override calls its parent's."""

    @wraps(save)
    def run(self: torch.optim.Optimizer, *args: object, **options: object) -> StateDict:
        with _outermost(self, "state_dict") as outermost:
            for hook in _hooks(self, "state_dict_pre") if outermost else ():
                hook(self)
            found = save(self, *args, **options)
        for hook in _hooks(self, "state_dict_post") if outermost else ():
            changed = hook(self, found)
            found = found if changed is None else changed
        return found

    return run


def loading_with_hooks(load: Callable[..., None]) -> Callable[..., None]:
    """A `load_state_dict` that calls the hooks of torch's, and takes one dict for a list of it."""

    @wraps(load)
    def run(self: torch.optim.Optimizer, given: object, *args: object, **options: object) -> None:
        with _outermost(self, "load_state_dict") as outermost:
            for hook in _hooks(self, "load_state_dict_pre") if outermost else ():
                changed = hook(self, given)
                given = given if changed is None else changed
            # One dict, as others hand it over: all that there is, masters included.
            if getattr(self, "loads_lists", False) and isinstance(given, dict):
                given, options = [given], {"load_from_fp32_weights": True, **options}
            load(self, given, *args, **options)
        for hook in _hooks(self, "load_state_dict_post") if outermost else ():
            hook(self)

    return run


@contextmanager
def _outermost(optimizer: object, method: str) -> Iterator[bool]:
    """True unless the call is inside one of the same method of the same optimizer."""
    running, own = _RUNNING.get(), (id(optimizer), method)
    token = _RUNNING.set(running | {own})
    try:
        yield own not in running
    finally:
        _RUNNING.reset(token)


def _hooks(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    return list(getattr(optimizer, f"_optimizer_{when}_hooks").values())
