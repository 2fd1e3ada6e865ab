"""Plans of an optimizer's own step: parts that are updated together, laid out once.

A plan fits for as long as parameters, their state and the kinds of their gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from twinstep.contract.moments import MOMENTS
from twinstep.contract.shards import check_gradient_shards, local_of
from twinstep.contract.tensors import FLOATS, check_dense_gradients
from twinstep.fast.runtime.lists import FixedLists, FixedTensors, Layout
from twinstep.fast.runtime.watch import GradientReader, StateWatch, gradient, same

StateOf = Callable[[Tensor], dict[str, Tensor]]
Key = tuple[object, ...]
_PARAMS: Callable[[Mapping[str, Any]], list[Tensor]] = itemgetter("params")


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """Parameters of one group on one device that are updated together.

    Attributes:
        index: of the group.
        device: of the parameters.
        numbers: places of their gradients among those of all groups.
        lists: parameters, gradients, first and second moments.
        steps: counters that advance; one for all, or one for each.
    """

    index: int
    device: torch.device
    numbers: Sequence[int]
    lists: list[Sequence[Tensor]]
    steps: FixedTensors


class StepPlan:
    """A step, but for the addresses of gradients and the values of hyper-parameters.

    Args:
        optimizer: whose groups are stepped.
        state_of: returns the state of a parameter; new where it has none.
        fixed: lists by part, kept where nothing but the plan has changed.
        shared: one counter is advanced for all parameters of a group and dtype.

    Attributes:
        parts: updates in the order of their launches.
        grads: of each part.
        device: of all parts; None where they have several, or there are none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        state_of: StateOf,
        fixed: Mapping[Key, FixedLists],
        *,
        shared: bool,
    ) -> None:
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._state_of, self._fixed, self._shared = state_of, fixed, shared
        self._where = f"{type(optimizer).__name__}.step"
        everything = list(chain(*self._params))
        check_dense_gradients(everything, self._where)
        # Of a DTensor this rank's part is stepped, with its part of the gradient.
        self._parts_of = {local_of(param): param for param in everything}
        self._dtensors = [param for part, param in self._parts_of.items() if part is not param]
        self._lend_gradients()
        self._reader = GradientReader(list(self._parts_of))
        self.parts: list[StepPart] = []
        for (index, device), places in self._by_device().items():
            self._add(index, device, places)
        self.grads = [part.lists[1] for part in self.parts]
        devices = {part.device for part in self.parts}
        self.device = devices.pop() if len(devices) == 1 else None
        self._state = StateWatch(optimizer.state, ("step", *MOMENTS))

    def _by_device(self) -> dict[tuple[int, torch.device], list[int]]:
        """Places of parameters that have a gradient, for each group and device."""
        found: dict[tuple[int, torch.device], list[int]] = {}
        place = 0
        for index, params in enumerate(self._params):
            for param in map(local_of, params):
                if param.grad is not None:
                    found.setdefault((index, param.device), []).append(place)
                    place += 1
        return found

    def _add(self, index: int, device: torch.device, places: list[int]) -> None:
        params = [self._reader.params[place] for place in places]
        states = [self._state_of(self._parts_of[param]) for param in params]
        if not self._shared:
            self._add_alike((index, device), places, states, states)
            return
        # Upstream's one counter: the last parameter counts, once for each dtype, for all of it.
        for dtype in FLOATS:
            rows = zip(places, params, states, strict=True)
            alike = [(at, state) for at, param, state in rows if param.dtype == dtype]
            if alike:
                chosen, own = map(list, zip(*alike, strict=True))
                self._add_alike((index, device, dtype), chosen, own, states[-1:])

    def _add_alike(
        self,
        key: tuple[Any, ...],
        places: list[int],
        states: list[dict[str, Tensor]],
        counting: list[dict[str, Tensor]],
    ) -> None:
        params = [self._reader.params[place] for place in places]
        columns = [params, *([local_of(state[name]) for state in states] for name in MOMENTS)]
        whole = places == list(range(places[0], places[0] + len(places)))
        contiguous = all(self._reader.contiguous[place] for place in places)
        layout = Layout([gradient(param) for param in params]) if contiguous else None
        chosen = slice(places[0], places[0] + len(places)) if whole else places
        fixed: list[Sequence[Tensor]] = [*self._fixed[key].of(chain(*columns), lambda: columns)]
        self.parts.append(
            StepPart(
                index=key[0],
                device=key[1],
                numbers=places,
                lists=[fixed[0], self._reader.moving(chosen, layout), *fixed[1:]],
                steps=FixedTensors(state["step"] for state in counting),
            )
        )

    def read(self, optimizer: torch.optim.Optimizer, *, shared: bool) -> bool:
        """Read the gradients of this step; False where the plan does not fit any more."""
        groups = optimizer.param_groups
        if len(groups) != len(self._params) or self._shared != shared:
            return False
        if not all(map(same, map(_PARAMS, groups), self._params)):
            return False
        if self._dtensors:
            if any(local_of(param) not in self._parts_of for param in self._dtensors):
                return False
            self._lend_gradients()
        return self._state.holds(optimizer.state) and self._reader.read()

    def _lend_gradients(self) -> None:
        """Let parts of DTensors have their parts of the gradients."""
        check_gradient_shards(self._dtensors, self._where)
        for param in self._dtensors:
            local_of(param).grad = None if param.grad is None else local_of(param.grad)


def laid_out(
    optimizer: torch.optim.Optimizer,
    state_of: StateOf,
    fixed: Mapping[Key, FixedLists],
    *,
    shared: bool = False,
) -> StepPlan:
    """Make a plan, and read the gradients of its first step; see `StepPlan`."""
    plan = StepPlan(optimizer, state_of, fixed, shared=shared)
    read = plan.read(optimizer, shared=shared)
    assert read
    return plan
