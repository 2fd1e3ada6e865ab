"""Plans of a wrapper's step: lists laid out once, and gradients read again in C.

A plan fits for as long as the same parameters have gradients, contiguous and in the same dtypes.
Marks of parameters (experts, tensor parallelism) are read when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

from torch import Tensor

from twinstep.contract.moments import MOMENTS
from twinstep.fast.optimizers.parallelism import Place
from twinstep.fast.runtime.lists import FixedLists, FixedTensors, Layout, MovingTensors
from twinstep.fast.runtime.watch import (
    Found,
    GradientReader,
    NotedGradients,
    Placed,
    StateWatch,
    addresses_of,
    gradient,
    same,
)


class GradientPlan:
    """Gradients of parameter groups, as the norm and the update take them.

    Args:
        groups: parameters of each group.
        places: of each parameter in the norm.
        zeros: makes what is read in place of a gradient that is missing.

    Attributes:
        fits: False where a gradient is not contiguous; nothing else may be called then.
        params: of all groups, with gradients or without.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        places: Sequence[Place],
        zeros: Callable[[Tensor], Tensor],
    ) -> None:
        self.params = list(chain(*groups))
        self._groups = [list(group) for group in groups]
        self._reader = GradientReader(self.params)
        self._zeros = zeros
        self.fits = all(self._reader.contiguous)
        self._counted = self._by_place(places) if self.fits else []
        self._given: list[_Given] = []

    def _by_place(self, places: Sequence[Place]) -> list[tuple[Place, slice | list[int], Layout]]:
        found: dict[Place, list[int]] = {}
        own = [at for at, param in zip(places, self.params, strict=True) if param.grad is not None]
        for index, place in enumerate(own):
            found.setdefault(place, []).append(index)
        grads = [gradient(param) for param in self._reader.params]
        return [
            (
                place,
                slice(0, len(own)) if len(members) == len(own) else members,
                Layout([grads[index] for index in members]),
            )
            for place, members in found.items()
        ]

    def read(self, groups: Sequence[Sequence[Tensor]]) -> Found | None:
        """Return the gradients of these groups; None where the plan does not fit any more."""
        if len(groups) != len(self._groups) or not all(map(same, groups, self._groups)):
            return None
        return self._reader.read()

    def drop(self) -> None:
        """Drop the gradients that were read."""
        self._reader.drop()

    def noted(self) -> NotedGradients:
        """Remember which tensors were read."""
        return self._reader.noted()

    def counted(self, found: Found) -> dict[Place, Sequence[Tensor]]:
        """Gradients by what they count for."""
        return {place: found.moving(members, layout) for place, members, layout in self._counted}

    def given(self, found: Found) -> list[Sequence[Tensor]]:
        """Gradients of each group, with zeros for those that are missing."""
        if not self._given:
            start = 0
            for group in self._groups:
                have = sum(param.grad is not None for param in group)
                self._given.append(_Given(group, slice(start, start + have), self._zeros))
                start += have
        return [given.of(found) for given in self._given]


class _Given:
    """Gradients of one group, complete."""

    def __init__(
        self, params: Sequence[Tensor], part: slice, zeros: Callable[[Tensor], Tensor]
    ) -> None:
        self._part = part
        # None where there is a gradient.
        self._zeros = [zeros(param) if param.grad is None else None for param in params]
        self._complete = part.stop - part.start == len(params)
        self._layout = Layout(
            [
                gradient(param) if zero is None else zero
                for param, zero in zip(params, self._zeros, strict=True)
            ]
        )

    def of(self, found: Found) -> Sequence[Tensor]:
        """Gradients in the order of the parameters, and zeros."""
        if self._complete:
            return found.moving(self._part, self._layout)
        rest = iter(found.moving(self._part, None))
        whole = [next(rest) if zero is None else zero for zero in self._zeros]
        return MovingTensors(whole, addresses_of(whole), self._layout)


class MasterPlan:
    """Lists of all groups with a master for each parameter, but for gradients.

    Args:
        gradients: the plan that they are read by; None if they must be looked at every time.
        columns: of each group, masters, counters, both moments and model weights.
        fixed: lists by group, kept where nothing but the plan has changed.
        states: returns the state of all masters, by dict.

    Attributes:
        lists: of each group, masters, first and second moments and model weights.
        steps: of each group, counters.
    """

    def __init__(
        self,
        gradients: GradientPlan | None,
        columns: Iterable[list[list[Tensor]]],
        fixed: Mapping[int, FixedLists],
        states: Callable[[], Sequence[Mapping[Tensor, Mapping[str, Tensor]]]],
    ) -> None:
        self._gradients = gradients
        self._masters: list[list[Tensor]] = []
        self.lists: list[list[FixedTensors]] = []
        self.steps: list[FixedTensors] = []
        for index, (masters, steps, *rest) in enumerate(columns):
            own = [masters, *rest]
            self._masters.append(masters)
            self.lists.append(fixed[index].of(partial(chain, *own), partial(_detached, own)))
            self.steps.append(FixedTensors(steps))
        self._placed = Placed(list(chain(*self._masters)))
        self._states = [StateWatch(state, ("step", *MOMENTS)) for state in states()]

    def holds(
        self,
        gradients: GradientPlan | None,
        masters: Sequence[Sequence[Tensor]],
        states: Sequence[Mapping[Tensor, Mapping[str, Tensor]]],
    ) -> bool:
        """Return True while everything lies where it did."""
        return (
            gradients is not None
            and gradients is self._gradients
            and len(masters) == len(self._masters)
            and all(map(same, masters, self._masters))
            and self._placed.holds()
            and all(watch.holds(state) for watch, state in zip(self._states, states, strict=True))
        )


def _detached(columns: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.detach() for tensor in column] for column in columns]
