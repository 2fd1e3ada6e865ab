"""Expectations for tensors whose values repeat: formed of one period, and repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.formats import INTEGERS
from twinstep.parity.expected.accepted import Accepted

Expected = Callable[[Case], Mapping[str, Sequence[Accepted]]]


def of_one_period(case: Case, expected: Expected) -> Mapping[str, Sequence[Accepted]]:
    """Accepted content of everything that a case writes, evaluated on one period of its tensors.

    Wherever an operation is not one of single elements, or a tensor does not repeat, the case is
    evaluated as it is.

    Args:
        case: gives the arguments.
        expected: evaluates a case.
    """
    short = _short(case)
    if short is None:
        return expected(case)
    found = dict(expected(short))
    for name in case.lists.keys() & found.keys():
        rows = zip(found[name], case.lists[name], strict=True)
        found[name] = [_grown(accepted, tensor) for accepted, tensor in rows]
    return found


def _short(case: Case) -> Case | None:
    """The case with one period of every tensor; None where that does not decide."""
    if not case.recipe.period or not case.operation.elementwise:
        return None
    lists: dict[str, list[Tensor]] = {}
    for name, tensors in case.lists.items():
        cut = [tensor if is_counter(tensor) else tensor.reshape(-1) for tensor in tensors]
        if not all(_repeats(tensor, case.recipe.period) for tensor in cut):
            return None
        lists[name] = [t if is_counter(t) else t[: case.recipe.period] for t in cut]
    return case.with_lists(lists)


def _repeats(tensor: Tensor, period: int) -> bool:
    if tensor.numel() <= period:
        return True
    bits = tensor.view(INTEGERS[8 * tensor.itemsize])
    return torch.equal(bits[period:], bits[:-period])


def _grown(accepted: Accepted, like: Tensor) -> Accepted:
    """The interval of one period, repeated over a tensor."""
    if is_counter(like) or not like.numel():
        return accepted

    def grown(part: Tensor) -> Tensor:
        times = -(-like.numel() // part.numel())
        return part.reshape(-1).repeat(times)[: like.numel()].reshape(like.shape)

    return accepted.moved(grown)
