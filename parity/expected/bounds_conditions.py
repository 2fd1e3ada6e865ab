"""Comparisons of numbers that carry a bound, and what is decided by them.

A condition is a number, 1 or 0, by the real operands; its error is 1 where it is open, because an
honest implementation may decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.expected.carried import Carried, known


def _comparison(
    compare: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Sequence[Carried]], Carried]:
    """A comparison of real numbers, open where another honest result decides otherwise."""

    def rule(operands: Sequence[Carried]) -> Carried:
        a, b = operands
        yes = compare(a.exact, b.exact)
        apart = (a.exact - b.exact).abs() > a.error + b.error
        settled = apart | ((a.error == 0) & (b.error == 0))
        return _decision(yes, ~settled | (yes != compare(a.value, b.value)))

    return rule


def _decision(yes: Tensor, open_: Tensor) -> Carried:
    return replace(known(yes), error=open_.to(torch.float64))


def _and(operands: Sequence[Carried]) -> Carried:
    a, b = operands
    no = ((a.exact == 0) & (a.error == 0)) | ((b.exact == 0) & (b.error == 0))
    return _decision((a.exact != 0) & (b.exact != 0), ((a.error != 0) | (b.error != 0)) & ~no)


def _or(operands: Sequence[Carried]) -> Carried:
    return _not([_and([_not([x]) for x in operands])])


def _not(operands: Sequence[Carried]) -> Carried:
    (a,) = operands
    return _decision(a.exact == 0, a.error != 0)


CONDITIONS: dict[str, Callable[[Sequence[Carried]], Carried]] = {
    "eq": _comparison(torch.eq),
    "ge": _comparison(torch.ge),
    "gt": _comparison(torch.gt),
    "le": _comparison(torch.le),
    "lt": _comparison(torch.lt),
    "ne": _comparison(torch.ne),
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__"), _and),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), _or),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
}
