"""Error bounds of what moves elements, and of sums, products and extremes over blocks.

A sum of n numbers in any order takes at most n - 1 roundings on top of each other (Higham 2002,
section 4.2), charged twice like every other rounding. An extreme, or a number's place in an order,
grows with each of them, so that its interval is that of the ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.expected.bounds import LARGEST, ROUNDING, SMALLEST
from twinstep.parity.expected.carried import (
    FIELDS,
    Arguments,
    Carried,
    Function,
    Keywords,
    Results,
    leaves,
    mapped,
    operand,
)

Dimensions = int | tuple[int, ...]
Over = tuple[Dimensions, bool]


def moved(function: Function, args: Arguments, kwargs: Keywords) -> Results:
    """Every fact of an element goes where the element goes."""
    computed = any(x.computed for x in leaves((args, kwargs)) if isinstance(x, Carried))

    def of(name: str) -> list[Tensor]:
        def field(x: object) -> object:
            return getattr(x, name).expand(x.exact.shape) if isinstance(x, Carried) else x

        result = function(*mapped(field, args), **mapped(field, kwargs))
        return [result] if isinstance(result, Tensor) else list(result)

    rows = zip(*(of(name) for name in FIELDS), strict=True)
    found = [Carried(**dict(zip(FIELDS, row, strict=True)), computed=computed) for row in rows]
    return found[0] if len(found) == 1 else tuple(found)


def padded(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """Elements around the others that are known."""
    c, sizes = operand(args[0]), args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0.0)

    def change(field: Tensor, around: object) -> Tensor:
        return function(field.expand(c.exact.shape), sizes, around)

    return replace(
        c,
        value=change(c.value, value),
        exact=change(c.exact, value),
        error=change(c.error, 0.0),
        peak=change(c.peak, abs(float(cast(float, value)))),
        gain=change(c.gain, 1.0),
        zone=change(c.zone.to(torch.uint8), 0).to(torch.bool),
    )


def _reduced(
    c: Carried, exact: Tensor, error: Tensor, peak: Tensor, zone: Tensor, over: Over
) -> Carried:
    error = torch.where(torch.isfinite(exact), error.nan_to_num(nan=torch.inf), 0.0)
    gain = c.gain.expand(c.exact.shape)
    gain = gain.amax(*over) if gain.numel() else torch.ones_like(exact)
    return Carried(value=exact, exact=exact, error=error, peak=peak, gain=gain, zone=zone)


def extreme(function: Function, args: Arguments, kwargs: Keywords) -> Results:
    """The largest or smallest of several, and where it is where that is asked for."""
    c, over = operand(args[0]), _over(args, kwargs)
    exact, low, high = (
        function(x, *args[1:], **kwargs) for x in (c.exact, c.exact - c.error, c.exact + c.error)
    )
    if isinstance(exact, Tensor):
        error = torch.maximum(high - exact, exact - low)
        return _reduced(c, exact, error, exact.abs(), _any(c, over), over)
    best, at = exact
    error = torch.maximum(high[0] - best, best - low[0])
    return _reduced(c, best, error, best.abs(), _any(c, over), over), _place(c, at)


def _place(c: Carried, at: Tensor) -> Carried:
    """A place in an order: open as a whole where any number of the tensor is."""
    exact, open_ = at.to(torch.float64), bool((c.error != 0).any() | c.zone.any())
    error = torch.full_like(exact, torch.inf if open_ else 0.0)
    zone = torch.zeros_like(at, dtype=torch.bool)
    gain = torch.ones_like(exact)
    return Carried(value=at, exact=exact, error=error, peak=exact, gain=gain, zone=zone)


def place(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """The place of the largest or the smallest, or every place in an order."""
    c = operand(args[0])
    return _place(c, function(c.exact, *args[1:], **kwargs))


def in_order(function: Function, args: Arguments, kwargs: Keywords) -> Results:
    """Numbers sorted, and their places."""
    c, pair = operand(args[0]), cast("Callable[..., tuple[Tensor, Tensor]]", function)
    exact, at = pair(c.exact, *args[1:], **kwargs)
    low, high = (pair(x, *args[1:], **kwargs)[0] for x in (c.exact - c.error, c.exact + c.error))
    error = torch.maximum(high - exact, exact - low).nan_to_num(nan=torch.inf)
    zone = torch.full_like(exact, bool(c.zone.any()), dtype=torch.bool)
    gain = torch.full_like(exact, float(c.gain.amax()) if c.gain.numel() else 1.0)
    found = Carried(value=exact, exact=exact, error=error, peak=exact.abs(), gain=gain, zone=zone)
    return found, _place(c, at)


def summed(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """A sum over dimensions."""
    return _total(function, args, kwargs, mean=False)


def averaged(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """A mean over dimensions: the quotient of a sum is rounded once more."""
    return _total(function, args, kwargs, mean=True)


def _total(function: Function, args: Arguments, kwargs: Keywords, *, mean: bool) -> Carried:
    c, over = operand(args[0]), _over(args, kwargs)
    exact = function(c.exact, *args[1:], **_of_any_dtype(kwargs))
    magnitude = (c.exact.abs() + c.error).sum(*over)
    count = c.exact.numel() / max(exact.numel(), 1)
    error = c.error.sum(*over) + math.ceil(count) * (ROUNDING * magnitude + SMALLEST)
    zone = _any(c, over) | ~(magnitude <= LARGEST)
    share = 1.0 / max(count, 1.0) if mean else 1.0
    error = share * error + (ROUNDING * exact.abs() + SMALLEST if mean else 0.0)
    found = _reduced(c, exact, error, magnitude, zone, over)
    return replace(found, gain=torch.ones_like(exact))


def running(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """Running sums: each of n sums has at most n - 1 roundings."""
    c, along = operand(args[0]), cast(int, args[1])
    exact = c.exact.cumsum(along)
    magnitude = (c.exact.abs() + c.error).cumsum(along)
    count = c.exact.shape[along] if c.exact.dim() else 1
    error = c.error.cumsum(along) + count * (ROUNDING * magnitude + SMALLEST)
    error = torch.where(torch.isfinite(exact), error, torch.zeros_like(error))
    zone = (c.zone.to(torch.int64).cumsum(along) > 0) | ~(magnitude <= LARGEST)
    gain = torch.ones_like(exact)
    return Carried(value=exact, exact=exact, error=error, peak=magnitude, gain=gain, zone=zone)


def multiplied(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """A product over a dimension, in any order: a part of it may overflow, or underflow."""
    c, over = operand(args[0]), _over(args, kwargs)
    exact = function(c.exact, *args[1:], **_of_any_dtype(kwargs))
    size = c.exact.abs()
    most, least = (function(x, *args[1:], **_of_any_dtype(kwargs)) for x in (size + c.error, size))
    peak = function((size + c.error).clamp_min(1.0), *args[1:], **_of_any_dtype(kwargs))
    count = math.ceil(c.exact.numel() / max(exact.numel(), 1))
    lost = torch.where(exact == 0, 0.0, count * SMALLEST * peak)
    error = most - least + count * ROUNDING * most + lost
    return _reduced(c, exact, error, peak, _any(c, over) | ~(peak <= LARGEST), over)


def _of_any_dtype(kwargs: Keywords) -> Keywords:
    return {name: value for name, value in kwargs.items() if name != "dtype"}


def _over(args: Arguments, kwargs: Keywords) -> Over:
    """Dimensions and keepdim of a reduction; all dimensions where it names none."""
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    every = tuple(range(operand(args[0]).exact.dim()))
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    named = every if given is None or given == [] else cast(Dimensions, given)
    return named, bool(keep)


def _any(c: Carried, over: Over) -> Tensor:
    zone = c.zone.expand(c.exact.shape).to(torch.uint8)
    return zone.amax(*over).to(torch.bool) if zone.numel() else zone.sum(*over).to(torch.bool)
