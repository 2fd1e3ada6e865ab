"""Comparisons of numbers that carry a bound, and what is decided by them.

A condition is a number, 1 or 0, by the real operands; its error is 1 where it is open, because an
honest implementation may decide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.expected.carried import (
    Arguments,
    Carried,
    Function,
    Keywords,
    Operands,
    known,
    operand,
)


def _comparison(
    compare: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Operands], Carried]:
    """A comparison of real numbers, open where another honest result decides otherwise."""

    def rule(operands: Operands) -> Carried:
        a, b = operands
        yes = compare(a.exact, b.exact)
        apart = (a.exact - b.exact).abs() > a.error + b.error
        settled = apart | ((a.error == 0) & (b.error == 0))
        open_ = ~settled | (yes != compare(a.value, b.value))
        if a is b:
            # A number compared with itself is asked whether it is NaN.
            open_ = a.zone & torch.isfinite(a.exact)
        # Against infinity it is asked whether it overflows: what is infinite without rounding does.
        for one, other in ((a, b), (b, a)):
            open_ = open_ | (one.zone & torch.isfinite(one.exact) & torch.isinf(other.exact))
        return _decision(yes, open_)

    return rule


def _decision(yes: Tensor, open_: Tensor) -> Carried:
    return replace(known(yes), error=open_.to(torch.float64))


def _truth(a: Carried) -> tuple[Tensor, Tensor]:
    """Whether a number is not zero, and whether that is open."""
    return a.exact != 0, (a.exact.abs() <= a.error) & (a.error != 0)


def _and(operands: Operands) -> Carried:
    (a, open_a), (b, open_b) = map(_truth, operands)
    no = (~a & ~open_a) | (~b & ~open_b)
    return _decision(a & b, (open_a | open_b) & ~no)


def _or(operands: Operands) -> Carried:
    return _not([_and([_not([x]) for x in operands])])


def _unlike(operands: Operands) -> Carried:
    (a, open_a), (b, open_b) = map(_truth, operands)
    return _decision(a != b, open_a | open_b)


def _not(operands: Operands) -> Carried:
    yes, open_ = _truth(operands[0])
    return _decision(~yes, open_)


def _kind(is_so: Callable[[Tensor], Tensor]) -> Callable[[Operands], Carried]:
    """A test for NaN or infinity, open where the order of operations decides."""

    def rule(operands: Operands) -> Carried:
        (a,) = operands
        yes = is_so(a.exact)
        return _decision(yes, a.zone | (yes != is_so(a.value)))

    return rule


def _signed(operands: Operands) -> Carried:
    """The sign of a computed zero is free."""
    (a,) = operands
    open_ = (a.exact.abs() <= a.error) & ((a.error > 0) | torch.as_tensor(a.computed))
    return _decision(torch.signbit(a.exact), open_)


def some(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """any: open where none is true for certain, and one may be."""
    c = operand(args[0])
    yes, surely, perhaps = (
        function(x, *args[1:], **kwargs)
        for x in (c.exact != 0, c.exact.abs() > c.error, (c.exact.abs() + c.error) > 0)
    )
    return _decision(yes, perhaps & ~surely)


def every(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """all: open where none is false for certain, and one may be."""
    c = operand(args[0])
    yes, surely, perhaps = (
        function(x, *args[1:], **kwargs)
        for x in (c.exact != 0, c.exact.abs() > c.error, (c.exact.abs() + c.error) > 0)
    )
    return _decision(yes, perhaps & ~surely)


CONDITIONS: dict[str, Callable[[Operands], Carried]] = {
    "eq": _comparison(torch.eq),
    "ge": _comparison(torch.ge),
    "gt": _comparison(torch.gt),
    "le": _comparison(torch.le),
    "lt": _comparison(torch.lt),
    "ne": _comparison(torch.ne),
    **dict.fromkeys(("bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("bitwise_xor", "logical_xor"), _unlike),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    "isinf": _kind(torch.isinf),
    "isnan": _kind(torch.isnan),
    "signbit": _signed,
}
