"""What every written argument of a case should hold: exact, or within the derived bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parity.bounds import ROUNDING, Bounded, Carried, charging, known
from parity.case import Case, evaluate
from parity.charges import UNKNOWN, Charges
from parity.operation import Bound
from parity.want import Want

Wants = Mapping[str, Sequence[Want]]


def wants(case: Case, arithmetic: str, charges: Charges = UNKNOWN) -> Wants:
    """Evaluate the reference on the CPU; with its bounds where the arithmetic is "bounded".

    Args:
        case: gives the arguments.
        arithmetic: what the kernel claims.
        charges: what its compiled code adds to the bounds.
    """
    if arithmetic == "exact" or case.operation.bound is Bound.EXACT:
        return {name: [Want(value=x) for x in xs] for name, xs in case.reference().items()}
    lists = {name: [_wrapped(x) for x in xs] for name, xs in case.lists.items()}
    controls = {
        control.name: case.controls[control.name]
        if control.output or control.name == "found_inf" or control.dtype != torch.float32
        else _wrapped(case.controls[control.name])
        for control in case.operation.controls
    }
    with charging(charges):
        results = evaluate(replace(case, controls=controls), lists)
    return {name: [_want(x) for x in xs] for name, xs in results.items()}


def _wrapped(x: Tensor) -> Tensor:
    return Bounded(known(x)) if x.dtype.is_floating_point else x


def _want(x: Tensor) -> Want:
    if not isinstance(x, Bounded):
        return Want(value=x)
    carried = x.carried
    if not bool(((carried.error != 0) | carried.zone).any()):
        return _untouched(x)
    low, high = _ends(carried)
    return Want(
        value=carried.value,
        low=low.to(x.dtype),
        high=high.to(x.dtype),
        exact=carried.exact,
        bound=carried.error,
        zone=carried.zone,
    )


def _untouched(x: Bounded) -> Want:
    """No rounding but the one to storage: there is nothing an honest kernel could do otherwise."""
    return Want(value=x.carried.value)


def _ends(carried: Carried) -> tuple[Tensor, Tensor]:
    """Both ends of the interval; in a zone it reaches from one order's result to the other's."""
    low = torch.where(carried.error > 0, carried.exact - carried.error, carried.exact)
    high = torch.where(carried.error > 0, carried.exact + carried.error, carried.exact)
    value = carried.value.to(torch.float64)
    room = value.abs() * 2 * ROUNDING
    low = torch.where(carried.zone, torch.fmin(low, value - room), low)
    high = torch.where(carried.zone, torch.fmax(high, value + room), high)
    return low, high
