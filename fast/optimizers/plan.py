"""Plans of a wrapper's step: lists laid out once, and gradients read again in C.

A plan fits for as long as the same parameters have gradients, contiguous and in the same dtypes.
Marks of parameters (experts, tensor parallelism) are read when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from twinstep.contract.moments import MOMENTS
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.parallelism import Gradients, Parallelism, Place
from twinstep.fast.runtime.lists import Layout
from twinstep.fast.runtime.watch import (
    GradientReader,
    NotedGradients,
    Placed,
    StateWatch,
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
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        places: Sequence[Place],
        zeros: Callable[[Tensor], Tensor],
    ) -> None:
        params = list(chain(*groups))
        self._groups = [list(group) for group in groups]
        self._reader = GradientReader(params)
        self._zeros = zeros
        self.fits = all(self._reader.contiguous)
        own = [at for at, param in zip(places, params, strict=True) if param.grad is not None]
        self._counted = self._by_place(own) if self.fits else {}
        self._gradients: Gradients | None = None
        self._given: list[Sequence[Tensor]] = []

    def _by_place(self, places: Sequence[Place]) -> dict[Place, Sequence[Tensor]]:
        """Gradients by what they count for."""
        at: dict[Place, list[int]] = {}
        for index, place in enumerate(places):
            at.setdefault(place, []).append(index)
        grads = [gradient(param) for param in self._reader.params]
        return {
            place: self._reader.moving(members, Layout([grads[index] for index in members]))
            for place, members in at.items()
        }

    def read(self, groups: Sequence[Sequence[Tensor]]) -> bool:
        """Read the gradients of these groups; False where the plan does not fit any more."""
        if len(groups) != len(self._groups) or not all(map(same, groups, self._groups)):
            return False
        return self._reader.read()

    def drop(self) -> None:
        """Drop the gradients that were read."""
        self._reader.drop()

    def noted(self) -> NotedGradients:
        """Remember which tensors were read."""
        return self._reader.noted()

    def gradients(self, parallelism: Parallelism) -> Gradients:
        """Gradients by what they count for."""
        if not parallelism.alone:
            return parallelism.gradients(self._counted)
        if self._gradients is None:
            self._gradients = parallelism.gradients(self._counted)
        return self._gradients

    def given(self) -> list[Sequence[Tensor]]:
        """Gradients of each group, with zeros for those that are missing."""
        if not self._given:
            start = 0
            for group in self._groups:
                self._given.append(self._complete(group, start))
                start += sum(param.grad is not None for param in group)
        return self._given

    def _complete(self, group: Sequence[Tensor], start: int) -> Sequence[Tensor]:
        """Gradients of one group, the first of which has a place, in the order of parameters."""
        places, zeros, rows = list[int](), list[Tensor](), list[Tensor]()
        for param in group:
            if param.grad is not None:
                places.append(start)
                rows.append(param.grad)
                start += 1
            else:
                places.append(len(self._reader.params) + len(zeros))
                zeros.append(self._zeros(param))
                rows.append(zeros[-1])
        chosen = places if zeros else slice(start - len(group), start)
        return self._reader.moving(chosen, Layout(rows), zeros)


class GroupPlan:
    """Tensors of all groups, as kernels take them, for as long as they stay where they are.

    Args:
        gradients: what reads the gradients among them.
        groups: of which all is kept.
        placed: by group, what the lists are views of, but for gradients and state.
        states: of all masters, by dict.
        corrections: the option `bias_correction` of each group.

    Attributes:
        groups: as they were given.
    """

    def __init__(
        self,
        gradients: object,
        groups: list[GroupTensors],
        placed: Sequence[Sequence[Tensor]],
        states: Sequence[Mapping[Tensor, Mapping[str, Tensor]]],
        corrections: list[object],
    ) -> None:
        self._gradients, self.groups, self._corrections = gradients, groups, corrections
        self._rows = [list(row) for row in placed]
        self._placed = Placed(list(chain(*self._rows)))
        self._states = [StateWatch(state, ("step", *MOMENTS)) for state in states]

    def holds(
        self,
        gradients: object,
        placed: Sequence[Sequence[Tensor]],
        states: Sequence[Mapping[Tensor, Mapping[str, Tensor]]],
        corrections: list[object],
    ) -> bool:
        """Return True while everything lies where it did."""
        return (
            gradients is self._gradients
            and len(placed) == len(self._rows)
            and all(map(same, placed, self._rows))
            and corrections == self._corrections
            and self._placed.holds()
            and all(map(StateWatch.holds, self._states, states))
        )
