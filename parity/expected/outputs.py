"""Accepted content of every written argument of a case: exact, or within the derived bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, evaluate
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.bounded import Bounded
from twinstep.parity.expected.bounds import ROUNDING, allowing_for, overflowing
from twinstep.parity.expected.carried import Carried, known
from twinstep.parity.expected.deviations import accepting
from twinstep.parity.expected.instruction_error import IEEE, UNKNOWN, InstructionError
from twinstep.parity.expected.packed import packed
from twinstep.parity.expected.periodic import of_one_period
from twinstep.parity.operations.operation import Bound

AcceptedOutputs = Mapping[str, Sequence[Accepted]]
# Steps that treat each element alone; whoever leaves a decay of 0 out of them is right.
DECAYING = ("adam_step", "adamw_step", "sgd_step", "mixed_step")


def accepted_outputs(
    case: Case, arithmetic: str, instruction_error: InstructionError = UNKNOWN
) -> AcceptedOutputs:
    """Evaluate the reference on the CPU; with its bounds where the arithmetic is "bounded".

    Args:
        case: gives the arguments.
        arithmetic: what the kernel claims.
        instruction_error: what its compiled code adds to the bounds.
    """

    def evaluated(case: Case) -> AcceptedOutputs:
        if arithmetic == "exact" or case.operation.bound is Bound.EXACT:
            return {name: [Accepted(value=x) for x in xs] for name, xs in case.reference().items()}
        results = other = _evaluated(case, instruction_error)
        if any(_zoned(x) for xs in results.values() for x in xs):
            with overflowing():
                other = _evaluated(case, instruction_error)
        return {name: list(map(_accepted, results[name], other[name])) for name in results}

    def lenient(case: Case) -> AcceptedOutputs:
        found = evaluated(case)
        return found if arithmetic == "exact" else _decay_left_out(case, found, evaluated)

    return of_one_period(case, lenient)


def _decay_left_out(
    case: Case, found: AcceptedOutputs, evaluated: Callable[[Case], AcceptedOutputs]
) -> AcceptedOutputs:
    """The same, where a decay of 0 may be left out of a step although 0 times a weight is NaN.

    The weight itself, which is infinite, then stays as it is.
    """
    if case.operation.name not in DECAYING or float(case.controls["weight_decay"]) != 0.0:
        return found
    finite = [torch.isfinite(param) for param in case.lists["params"]]
    if all(bool(each.all()) for each in finite):
        return found
    weights = case.lists["params"]
    zeros = [p.masked_fill(~kept, 0.0) for p, kept in zip(weights, finite, strict=True)]
    others = dict(evaluated(case.with_lists({**case.lists, "params": zeros})))
    for name in case.lists.keys() & {"params", "copies"}:
        kept = [
            weight.to(row.value.dtype) for weight, row in zip(weights, found[name], strict=False)
        ]
        others[name] = [Accepted(value=x, low=x, high=x) for x in kept]
    rows = {name: found[name] for name in case.lists.keys() & found.keys() - {"steps"}}
    return {
        **found,
        **{name: list(map(_either, row, others[name], finite)) for name, row in rows.items()},
    }


def _either(one: Accepted, other: Accepted, decided: Tensor) -> Accepted:
    """The first interval; outside of a mask the second, too, where the first is NaN alone."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return one
    free = ~decided & torch.isnan(one.value)
    low, high = (torch.where(free, b, a) for a, b in ((one.low, other.low), (one.high, other.high)))
    return replace(one, low=low, high=high)


@dataclass(frozen=True)
class Truth:
    """The specification of one tensor in real numbers, all of its shape.

    Attributes:
        exact: float64, nothing rounded.
        error: what fp32 arithmetic may make of it, float64.
        zone: where fp32 may overflow on the way.
    """

    exact: Tensor
    error: Tensor
    zone: Tensor


def truths(case: Case, *, rounded: bool = False) -> dict[tuple[str, int], Truth]:
    """The specification of everything written that a formula specifies, by name and index.

    Args:
        case: whose arguments it takes.
        rounded: what is made of fp32 controls alone is rounded, as on the host.
    """
    return {
        (name, index): Truth(x.carried.exact, x.carried.error, x.carried.zone)
        for name, xs in _evaluated(case, IEEE, rounded=rounded).items()
        for index, x in enumerate(xs)
        if isinstance(x, Bounded)
    }


def _evaluated(
    case: Case, instruction_error: InstructionError, *, rounded: bool = False
) -> dict[str, list[Tensor]]:
    """What the reference makes of numbers that carry their bound, which rounded controls do not."""
    few = packed(case)
    every = case.lists if few is None else few.lists()
    lists = {name: [_wrapped(x) for x in xs] for name, xs in every.items()}
    controls = {
        control.name: accepting(control.name, case.controls[control.name], case.operation.accepts)
        if control.output
        or control.name == "found_inf"
        or control.dtype != torch.float32
        or rounded
        else _wrapped(case.controls[control.name])
        for control in case.operation.controls
    }
    with allowing_for(instruction_error):
        found = evaluate(replace(case, controls=controls), lists)
    return found if few is None else few.apart(found)


def _wrapped(x: Tensor) -> Tensor:
    return Bounded(known(x)) if x.dtype.is_floating_point else x


def _zoned(x: Tensor) -> bool:
    return isinstance(x, Bounded) and bool(x.carried.zone.any())


def _accepted(x: Tensor, other: Tensor) -> Accepted:
    if not (isinstance(x, Bounded) and isinstance(other, Bounded)):
        return Accepted(value=x)
    carried = x.carried
    if not bool(((carried.error != 0) | carried.zone).any()):
        return _untouched(x)
    low, high = _ends(carried, other.carried)
    if not x.dtype.is_floating_point:
        return _of_integers(carried, low, high)
    zone = carried.zone
    if x.dtype.itemsize == 1:
        # Past the largest number a conversion saturates, or gives NaN or infinity.
        top = torch.finfo(x.dtype).max
        zone = zone | (torch.maximum(low.abs(), high.abs()) > top)
        low, high = low.clamp(-top, top), high.clamp(-top, top)
    return Accepted(
        value=carried.value,
        low=_inside(low, x.dtype, torch.inf),
        high=_inside(high, x.dtype, -torch.inf),
        exact=carried.exact,
        bound=carried.error,
        zone=zone,
    )


def _of_integers(carried: Carried, low: Tensor, high: Tensor) -> Accepted:
    """Every integer of the interval, whose ends are whole; those of the type where it is open."""
    kind = torch.iinfo(carried.value.dtype)
    open_ = carried.zone | ~torch.isfinite(low) | ~torch.isfinite(high)
    low = torch.where(open_, torch.full_like(low, kind.min), low).clamp(kind.min, kind.max)
    high = torch.where(open_, torch.full_like(high, kind.max), high).clamp(kind.min, kind.max)
    dtype = carried.value.dtype
    zone = torch.zeros_like(open_)
    return Accepted(value=carried.value, low=low.to(dtype), high=high.to(dtype), zone=zone)


def _untouched(x: Bounded) -> Accepted:
    """No rounding but the one to storage: the same number, a zero of either sign."""
    value = x.carried.value
    zone = torch.zeros_like(value, dtype=torch.bool)
    return Accepted(value=value, low=value, high=value, zone=zone)


def _inside(end: Tensor, dtype: torch.dtype, inwards: float) -> Tensor:
    """The end of an interval as a number of the dtype.

    The rounding to few bits is not in the bound, so the end is rounded as a result would be. The
    last rounding to fp32 is in it: there the end is the outermost number inside.
    """
    rounded = end.to(dtype)
    if dtype not in (torch.float32, torch.float64):
        return rounded
    wide = rounded.to(torch.float64)
    outside = wide < end if inwards > 0 else wide > end
    return torch.where(
        outside, torch.nextafter(rounded, torch.full_like(rounded, inwards)), rounded
    )


def _ends(carried: Carried, other: Carried) -> tuple[Tensor, Tensor]:
    """Both ends of the interval; in a zone it reaches from one order's result to the other's."""
    low, high = _interval(carried)
    other_low, other_high = _interval(other)
    value = carried.value.to(torch.float64)
    room = value.abs() * 2 * ROUNDING
    low = torch.where(carried.zone, low.fmin(value - room).fmin(other_low), low)
    high = torch.where(carried.zone, high.fmax(value + room).fmax(other_high), high)
    return low, high


def _interval(carried: Carried) -> tuple[Tensor, Tensor]:
    low = torch.where(carried.error > 0, carried.exact - carried.error, carried.exact)
    high = torch.where(carried.error > 0, carried.exact + carried.error, carried.exact)
    return low, high
