"""Evaluation of many tensors as few: those that differ in their elements alone as one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.expected.bounded import Bounded

ELEMENTS = ("value", "exact", "error", "peak", "gain", "zone")
Group = list[int]
Results = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Packed:
    """A case with the tensors of each group one behind the other, in one tensor.

    Every operation on numbers that carry their bound is some twenty of torch, whatever the size:
    a list of a thousand tensors of three elements took seconds.

    Attributes:
        case: as it was.
        groups: positions in its lists.
    """

    case: Case
    groups: list[Group]

    def lists(self) -> dict[str, list[Tensor]]:
        """The lists of the case, with one tensor for each group."""
        return {
            name: [_joined([tensors[at] for at in group]) for group in self.groups if tensors]
            for name, tensors in self.case.lists.items()
        }

    def apart(self, results: Results) -> dict[str, list[Tensor]]:
        """Results of the groups, tensor by tensor."""
        return {name: self._apart(name, list(found)) for name, found in results.items()}

    def _apart(self, name: str, found: list[Tensor]) -> list[Tensor]:
        tensors = self.case.lists.get(name)
        if not tensors:
            return found
        single: dict[int, Tensor] = {}
        for group, result in zip(self.groups, found, strict=True):
            members = [tensors[at] for at in group]
            single |= zip(group, _parts(result, members), strict=True)
        return [single[at] for at in range(len(tensors))]


def packed(case: Case) -> Packed | None:
    """The groups of a case; None where nothing would be saved or elements depend on one another."""
    lists = [list(tensors) for tensors in case.lists.values() if tensors]
    if not case.operation.elementwise or len({len(tensors) for tensors in lists}) != 1:
        return None
    groups: dict[object, Group] = {}
    for at, row in enumerate(zip(*lists, strict=True)):
        groups.setdefault(_kind(at, row), []).append(at)
    return Packed(case, list(groups.values())) if len(groups) < len(lists[0]) else None


def _kind(at: int, row: Sequence[Tensor]) -> object:
    """Equal for tensors that one tensor can take the place of: dimensions, dtypes, counters."""
    counters = [int(t) for t in row if is_counter(t)]
    if len({t.numel() for t in row if not is_counter(t)}) != 1:
        return at
    return (*counters, *((t.dtype, t.dim() or -at) for t in row if not is_counter(t)))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if len(tensors) == 1 or is_counter(first):
        return first
    return torch.cat([t.reshape(-1) for t in tensors]).reshape(-1, *[1] * (first.dim() - 1))


def _parts(result: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A result for a group, cut into those for its tensors."""
    if len(like) == 1 or is_counter(like[0]):
        return [result] * len(like)
    if not isinstance(result, Bounded):
        return _cut(result, result, like)
    carried = result.carried
    cut = [_cut(getattr(carried, name), carried.value, like) for name in ELEMENTS]
    return [
        Bounded(replace(carried, **dict(zip(ELEMENTS, row, strict=True))), pending=result.pending)
        for row in zip(*cut, strict=True)
    ]


def _cut(part: Tensor, whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    flat = part.expand_as(whole).reshape(-1)
    pieces = torch.split(flat, [t.numel() for t in like])
    return [piece.reshape(t.shape) for piece, t in zip(pieces, like, strict=True)]
