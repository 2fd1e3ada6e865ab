"""Error bounds of functions of one or two numbers: exp, log, sin, pow, ..., and of jumps.

A monotone function takes an interval to the interval of its ends; so does a step, whose jump is
inside where the operand meets it. Where a function turns, its slope bounds it. On top of that comes
what a library's function may be off (`parity/expected/instruction_error.py`), and what the kernel's
own approximate instructions add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from twinstep.parity.expected.bounds import (
    ROUNDING,
    decided,
    divide,
    extremum,
    flushable,
    instruction_error,
    multiply,
    reciprocal,
    settled,
    square_root,
)
from twinstep.parity.expected.carried import (
    Arguments,
    Carried,
    Function,
    Keywords,
    Operands,
    Rule,
    operand,
)
from twinstep.parity.expected.instruction_error import library_error

Unary = Callable[[Tensor], Tensor]
Ends = tuple[Tensor, Tensor]


def _ends(c: Carried) -> Ends:
    """The ends of an interval: without any where another order may overflow, to either side."""
    low, high = c.exact - c.error, c.exact + c.error
    return torch.where(c.zone, -torch.inf, low), torch.where(c.zone, torch.inf, high)


def _reach(exact: Tensor, values: tuple[Tensor, ...]) -> Tensor:
    """How far the values lie from the exact one at most; infinite where one is none."""
    away = torch.stack([(value - exact).abs() for value in values]).amax(0)
    # The difference of two equal infinities is none.
    same = torch.stack([value == exact for value in values]).all(0)
    away = torch.where(same, torch.zeros_like(away), away).nan_to_num(nan=torch.inf)
    return torch.where(torch.isfinite(exact), away, torch.zeros_like(away))


def of_ends(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """The interval of the ends: a step, a limit, or another monotone function that is exact."""
    c = operand(args[0])
    exact, *ends = (function(x, *args[1:], **kwargs) for x in (c.exact, *_ends(c)))
    return replace(c, exact=exact, error=_reach(exact, tuple(ends)), peak=exact.abs())


def between(*names: str) -> Rule:
    """The rule of a clamp with these limits, which may be tensors."""

    def rule(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
        limits = {**dict(zip(names, args[1:], strict=False)), **kwargs}
        if not any(isinstance(limit, Carried | Tensor) for limit in limits.values()):
            return of_ends(function, args, kwargs)
        c = operand(args[0])
        for name, pick in (("min", torch.maximum), ("max", torch.minimum)):
            if limits.get(name) is not None:
                c = extremum(pick)([c, operand(limits[name])])
        return c

    return rule


def wrapped(
    name: str, *, spread: Unary | None = None, absolute: float = 0.0, turns: str = ""
) -> Rule:
    """The rule of a function of one number.

    Args:
        name: of the library's function.
        spread: of an operand, how many roundings more the result shows because it may be formed
            through an exponential; by default none.
        absolute: charge that does not shrink with the result.
        turns: "even" (falls, then grows), "wave" (never steeper than 1, between -1 and 1), "tan";
            by default it is monotone.
    """

    def rule(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
        c = operand(args[0])
        c = replace(c, error=c.error + flushable(c, "function"))
        exact = function(c.exact, *args[1:], **kwargs)
        low, high = _ends(c)
        if turns == "wave":
            error = torch.where(c.zone, 2.0, c.error.clamp_max(2.0))
        elif turns == "even":
            least = torch.where((low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs()))
            most = torch.maximum(low.abs(), high.abs())
            error = _reach(exact, tuple(function(x, *args[1:], **kwargs) for x in (least, most)))
        else:
            error = _reach(exact, tuple(function(x, *args[1:], **kwargs) for x in (low, high)))
        if turns == "tan":
            branch = torch.floor(low / math.pi + 0.5) != torch.floor(high / math.pi + 0.5)
            error = torch.where(branch, torch.inf, error)
        return _charged(name, c, exact, error, absolute, spread)

    return rule


def _charged(
    name: str,
    c: Carried,
    exact: Tensor,
    error: Tensor,
    absolute: float,
    spread: Unary | None,
) -> Carried:
    """The error with what a function's own code may add."""
    relative, fixed = library_error(name, c.exact, instruction_error())
    grown = 0.0 if spread is None else spread(c.exact)
    error = error + (ROUNDING * (1.0 + grown) + relative) * exact.abs() + absolute + fixed
    zone = c.zone
    found = Carried(
        value=exact,
        exact=exact,
        error=error,
        peak=exact.abs(),
        gain=torch.ones_like(exact),
        zone=zone,
    )
    return replace(found, error=error + flushable(found, "function"))


def _over_corners(
    function: Callable[[Tensor, Tensor], Tensor], a: Carried, b: Carried
) -> tuple[Tensor, Tensor]:
    """The value and the reach of a function that is monotone in each of two numbers."""
    exact = function(a.exact, b.exact)
    corners = tuple(function(x, y) for x in _ends(a) for y in _ends(b))
    return exact, _reach(exact, corners)


def _of_two(a: Carried, b: Carried, exact: Tensor, error: Tensor) -> Carried:
    zone = (a.zone | b.zone).expand(exact.shape)
    return Carried(
        value=exact,
        exact=exact,
        error=error,
        peak=exact.abs(),
        gain=torch.ones_like(exact),
        zone=zone,
    )


def angle(operands: Operands) -> Carried:
    """Angles: extreme at the corners, unless the rectangle meets the origin or the cut at x < 0."""
    y, x = operands
    exact, error = _over_corners(torch.atan2, y, x)
    cut = (y.exact.abs() <= y.error) & (x.exact - x.error <= 0) & ((y.error > 0) | (x.error > 0))
    error = torch.where(cut, 2 * math.pi, error)
    relative, fixed = library_error("atan2", x.exact, instruction_error())
    return _of_two(y, x, exact, error + (ROUNDING + relative) * exact.abs() + fixed)


def power(operands: Operands) -> Carried:
    """Powers: by products or a root where the exponent is such a one, else by a logarithm."""
    a, b = operands
    number = b.exact.item() if b.exact.numel() == 1 and not bool(b.error.any()) else None
    if number in _POWERS:
        return _POWERS[number](a)
    exact, error = _over_corners(torch.pow, a, b)
    low, high = _ends(a)
    whole = (b.exact == b.exact.round()) & (b.error == 0)
    # An even power turns at 0, a negative one has a pole there, and others have nothing below it.
    inside = (low <= 0) & (high >= 0) & (a.error > 0)
    error = torch.where(inside & whole & (b.exact > 0), _reach_of_zero(exact, error), error)
    error = torch.where(inside & (b.exact <= 0) & (b.exact != 0), torch.inf, error)
    error = torch.where(~whole & (low < 0), torch.inf, error)
    logarithm = a.exact.abs().log().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    through = (b.exact * logarithm).abs()
    relative, _ = library_error("pow", a.exact, instruction_error())
    slow, fixed = library_error("log", a.exact, instruction_error())
    by_logarithm = b.exact.abs() * (slow * logarithm.abs() + fixed)
    error = error + (ROUNDING * (1.0 + 2.0 * through) + relative + by_logarithm) * exact.abs()
    return _of_two(a, b, exact, error)


def _reach_of_zero(exact: Tensor, error: Tensor) -> Tensor:
    return torch.maximum(error, exact.abs())


def _squared(a: Carried) -> Carried:
    return multiply([a, a])


def _rooted(a: Carried) -> Carried:
    root = square_root([a])
    return settled(root, root.exact)


def inverse_root(operands: Operands) -> Carried:
    """Inverse roots: the reciprocal of a root, each with its rounding."""
    return reciprocal([_rooted(operands[0])])


_POWERS: dict[float | None, Callable[[Carried], Carried]] = {
    1.0: lambda a: a,
    2.0: _squared,
    3.0: lambda a: multiply([settled(_squared(a), a.exact), a]),
    0.5: lambda a: square_root([a]),
    -0.5: lambda a: inverse_root([a]),
    -1.0: lambda a: reciprocal([a]),
    -2.0: lambda a: reciprocal([settled(_squared(a), a.exact)]),
}


def remainder_of(step: Unary) -> Callable[[Operands], Carried]:
    """Remainders, a - b step(a / b): as wide as b where an honest quotient steps elsewhere."""

    def rule(operands: Operands) -> Carried:
        a, b = operands
        quotient = divide([a, b])
        low, high = (step(x) for x in _ends(quotient))
        turns = step(a.exact / b.exact)
        exact = a.exact - b.exact * turns
        exact = torch.where(torch.isinf(b.exact) & (turns == 0), a.exact, exact)
        error = a.error + turns.abs() * b.error
        rounded = ROUNDING * (a.exact.abs() + (b.exact * turns).abs() + exact.abs())
        certain = (a.error == 0) & (b.error == 0) & (turns == 0)
        # The result has the divisor's size whatever the quotient is.
        error = torch.where(low == high, error, 2 * (b.exact.abs() + b.error))
        error = error + torch.where(certain & (low == high), 0.0, rounded)
        return _of_two(a, b, exact, error)

    return rule


def quotient(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """A division, with a step where a rounding mode is given; the step's jump may be inside."""
    a, b = (operand(x) for x in args[:2])
    divided, mode = divide([a, b]), kwargs.get("rounding_mode")
    found = settled(divided, divided.exact)
    found = replace(found, zone=found.zone & ~decided(a, b))
    if mode is None:
        return found
    return of_ends(torch.floor if mode == "floor" else torch.trunc, [found], {})


def signed_as(operands: Operands) -> Carried:
    """Magnitudes with another sign: with either where the second number may be a zero."""
    a, b = operands
    sign = torch.copysign(torch.ones_like(b.exact), b.exact)
    exact = a.exact.abs() * sign
    open_ = (b.exact.abs() <= b.error) & ((b.error > 0) | (torch.as_tensor(b.computed)))
    error = a.error + torch.where(open_, 2 * exact.abs(), 0.0)
    return replace(_of_two(a, b, exact, error), gain=a.gain.expand(exact.shape))


def negative_exponential(x: Tensor) -> Tensor:
    """The spread of a sigmoid, which is 1 - exp(-x) far above zero."""
    return x.clamp(max=0.0).abs()


def magnitude(x: Tensor) -> Tensor:
    """The spread of an exponential, whose exponent is rounded."""
    return x.abs()


TANH = 4 * ROUNDING
"""Of 2 sigmoid(2x) - 1, as tanh may be written."""
