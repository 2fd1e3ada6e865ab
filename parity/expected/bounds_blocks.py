"""Error bounds of sums, maxima and roundings over blocks, for operations that users bring.

A sum of n numbers in any order takes at most n - 1 roundings on top of each other (Higham 2002,
section 4.2), charged twice like every other rounding. A monotone function of an interval is the
interval of its ends: so a rounding to integers, whose neighbours an honest implementation may
choose near a tie, is derived and not allowed for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.expected.bounds import (
    LARGEST,
    ROUNDING,
    SMALLEST,
    WHOLE_RULES,
    Bounded,
    charged,
)
from twinstep.parity.expected.carried import Carried, known

Function = Callable[..., Tensor]
Arguments = Sequence[object]
Keywords = dict[str, object]
Dimensions = int | tuple[int, ...]
MOVES = (
    "_unsafe_view",
    "expand",
    "permute",
    "select",
    "slice",
    "transpose",
    "view",
)
MONOTONE = ("ceil", "clamp", "clamp_max", "clamp_min", "floor", "round", "sgn", "sign", "trunc")


def _first(args: Arguments) -> Carried:
    x = args[0]
    return charged(x) if isinstance(x, Bounded) else known(cast(Tensor, x))


def _moved(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """Every fact of an element goes where the element goes."""
    c = _first(args)

    def change(field: Tensor) -> Tensor:
        return function(field.expand(c.exact.shape), *args[1:], **kwargs)

    return replace(
        c,
        value=change(c.value),
        exact=change(c.exact),
        error=change(c.error),
        peak=change(c.peak),
        gain=change(c.gain),
        zone=change(c.zone),
    )


def _padded(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """Elements around the others that are known."""
    c, sizes = _first(args), args[1]
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


def _monotone(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """The interval of the ends, so that both sides of a jump are inside where the operand meets it."""
    c = _first(args)
    exact, low, high = (
        function(x, *args[1:], **kwargs) for x in (c.exact, c.exact - c.error, c.exact + c.error)
    )
    error = torch.maximum(high - exact, exact - low).nan_to_num(nan=torch.inf)
    error = torch.where(torch.isfinite(exact), error, torch.zeros_like(error))
    return replace(c, exact=exact, error=error, peak=exact.abs())


def _largest(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
    """The largest of several: no further from the truth than the worst of them."""
    c, over = _first(args), _over(args, kwargs)
    exact = function(c.exact, *args[1:], **kwargs)
    low, high = (function(x, *args[1:], **kwargs) for x in (c.exact - c.error, c.exact + c.error))
    return replace(
        c,
        exact=exact,
        error=torch.maximum(high - exact, exact - low),
        peak=exact.abs(),
        gain=c.gain.expand(c.exact.shape).amax(*over),
        zone=_any(c, over),
    )


def _summed(
    function: Function, args: Arguments, kwargs: Keywords, *, mean: bool = False
) -> Carried:
    c, over = _first(args), _over(args, kwargs)
    exact = function(c.exact, *args[1:], **kwargs)
    magnitude = (c.exact.abs() + c.error).sum(*over)
    count = c.exact.numel() / max(exact.numel(), 1)
    error = c.error.sum(*over) + math.ceil(count) * (ROUNDING * magnitude + SMALLEST)
    zone = _any(c, over) | ~(magnitude <= LARGEST)
    share = 1.0 / max(count, 1.0) if mean else 1.0
    # The quotient of a mean is rounded once more.
    error = share * error + (ROUNDING * exact.abs() + SMALLEST if mean else 0.0)
    error = torch.where(torch.isfinite(exact), error, torch.zeros_like(error))
    return replace(
        c, exact=exact, error=error, peak=magnitude, gain=torch.ones_like(exact), zone=zone
    )


def _over(args: Arguments, kwargs: Keywords) -> tuple[Dimensions, bool]:
    """Dimensions and keepdim of a reduction; all dimensions where it names none."""
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    every = tuple(range(cast(Tensor, args[0]).dim()))
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    named = every if given is None or given == [] else cast(Dimensions, given)
    return named, bool(keep)


def _any(c: Carried, over: tuple[Dimensions, bool]) -> Tensor:
    zone = c.zone.expand(c.exact.shape).to(torch.uint8)
    return zone.amax(*over).to(torch.bool)


def add_block_rules() -> None:
    """Let references of users reduce, round and cut into blocks; nothing the second time."""
    WHOLE_RULES.update(dict.fromkeys(MOVES, _moved))
    WHOLE_RULES.update(dict.fromkeys(MONOTONE, _monotone))
    WHOLE_RULES.update({"amax": _largest, "max": _largest, "constant_pad_nd": _padded})
    WHOLE_RULES.update({"sum": _summed, "mean": partial(_summed, mean=True)})
