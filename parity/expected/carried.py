"""Values carried by each element of a bounded tensor besides its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

FIELDS = ("value", "exact", "error", "peak", "gain", "zone")
Nested = TypeVar("Nested")
Function = Callable[..., Tensor]
Arguments = Sequence[object]
Keywords = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Facts of each element of a `Bounded` tensor; all float64 but `value` and `zone`.

    Attributes:
        value: the reference's own result, in the dtype of the formula.
        exact: the formula in float64.
        error: bound on |honest result - exact|.
        peak: largest magnitude that some order of the multiplications may pass through.
        gain: by how much divisions on the way may have magnified an underflow; 0 if there is none.
        zone: whether overflow depends on the order of operations.
        computed: whether an operation made it, so that another order may have rounded it otherwise.
    """

    value: Tensor
    exact: Tensor
    error: Tensor
    peak: Tensor
    gain: Tensor
    zone: Tensor
    computed: bool = True


def known(value: Tensor) -> Carried:
    """A number without error: an input, or a scalar the reference has formed."""
    exact = value.to(torch.float64)
    zero = torch.zeros_like(exact)
    zone = torch.zeros_like(exact, dtype=torch.bool)
    return Carried(
        value=value,
        exact=exact,
        error=zero,
        peak=exact.abs(),
        gain=zero + 1.0,
        zone=zone,
        computed=False,
    )


Operands = Sequence[Carried]
Results = Carried | tuple[Carried, ...]
Rule = Callable[[Function, Arguments, Keywords], Results]
"""From the operator as a function of plain tensors and its arguments, each tensor of which is a
`Carried`, to what its results carry; but for their `value`."""


def operand(x: object) -> Carried:
    """The facts of an argument: a plain number or tensor has no error."""
    if isinstance(x, Carried):
        return x
    if isinstance(x, Tensor):
        return known(x)
    return known(torch.tensor(cast(float, x), dtype=torch.float64))


def of_operands(rule: Callable[[Operands], Carried]) -> Rule:
    """The rule of an operator whose arguments are numbers and tensors alone."""

    def whole(function: Function, args: Arguments, kwargs: Keywords) -> Carried:
        return rule([operand(x) for x in args if isinstance(x, Carried | Tensor | float | int)])

    return whole


def mapped(change: Callable[[object], object], x: Nested) -> Nested:
    """Arguments of an operator with each of their leaves changed."""
    if isinstance(x, list | tuple):
        return cast(Nested, type(x)([mapped(change, each) for each in x]))
    if isinstance(x, dict):
        return cast(Nested, {name: mapped(change, each) for name, each in x.items()})
    return cast(Nested, change(x))


def leaves(x: object) -> Iterator[object]:
    """Whatever is in arguments or results of an operator and is no list."""
    if isinstance(x, list | tuple):
        for each in x:
            yield from leaves(each)
    elif isinstance(x, dict):
        yield from leaves(list(x.values()))
    else:
        yield x
