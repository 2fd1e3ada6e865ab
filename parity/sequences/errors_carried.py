"""Numbers with error bounds that are carried from step to step, and what they accept.

State of a class under the names of its own cannot be read, nor set to the reference's bits. But
errors of moments shrink with every step, as the moments do: `b1 m` has b1 times the error of m. So
each number of the state has a bound that grows with the roundings and shrinks with the decay,
and only weights are looked at: each new weight lies within the bound that follows from the
class's own weight before the step. From there the reference goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.sequences.contracts import Contract, ParamPlace
from twinstep.parity.sequences.world import World

# Half ULPs that one operation may be wrong by: its rounding, that of a scalar, and those of
# another order of operations.
ROUNDINGS = 4


@dataclass(frozen=True)
class Near:
    """Real numbers within `error` of `exact`, both float64; has the methods that equations use.

    Attributes:
        exact: the equation in float64.
        error: largest distance of an honest result; infinite where anything may come out.
        dtype: of parameters and state, whose roundings are charged.
    """

    exact: Tensor
    error: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.exact.shape

    def new_zeros(self, shape: torch.Size) -> Near:
        """Zeros, without error."""
        return Near(torch.zeros_like(self.exact), torch.zeros_like(self.exact), self.dtype)

    def _charged(self, exact: Tensor, error: Tensor, size: Tensor) -> Near:
        """A result: the roundings of numbers of that size on top of what was there."""
        unit = torch.finfo(self.dtype)
        rounded = error + ROUNDINGS / 2 * unit.eps * size
        rounded += (rounded > 0) * (ROUNDINGS * unit.smallest_normal * unit.eps)
        whole = (exact.abs() + rounded < unit.max * (1 - unit.eps)) & torch.isfinite(exact)
        return Near(exact, torch.where(whole, rounded, torch.inf), self.dtype)

    def add(self, other: Near | float, alpha: float = 1.0) -> Near:
        """`self + alpha * other`."""
        if not isinstance(other, Near):
            exact = torch.full_like(self.exact, other)
            other = Near(exact, torch.zeros_like(exact), self.dtype)
        b, error = other.exact * alpha, other.error * abs(alpha)
        size = self.exact.abs() + b.abs()
        # What is added to zero, or is zero, rounds nothing.
        size = torch.where((self.exact == 0) & (b == 0), 0.0, size)
        return self._charged(self.exact + b, self.error + error, size)

    def __mul__(self, other: Near | float) -> Near:
        """`self * other`."""
        if not isinstance(other, Near):
            exact = self.exact * other
            return self._charged(exact, self.error * abs(other), exact.abs())
        exact = self.exact * other.exact
        error = self.exact.abs() * other.error + other.exact.abs() * self.error
        return self._charged(exact, error + self.error * other.error, exact.abs())

    def __truediv__(self, other: Near | float) -> Near:
        """`self / other`; anything may come out where the divisor may be zero."""
        if not isinstance(other, Near):
            return self * (1 / other)
        least = other.exact.abs() - other.error
        exact = self.exact / other.exact
        error = (self.error + exact.abs() * other.error) / least
        return self._charged(exact, torch.where(least > 0, error, torch.inf), exact.abs())

    def lerp(self, end: Near, weight: float) -> Near:
        """`self + weight * (end - self)`."""
        return (self * (1 - weight)).add(end, alpha=weight)

    def addcmul(self, a: Near, b: Near, value: float) -> Near:
        """`self + value * a * b`."""
        return self.add(a * b, alpha=value)

    def addcdiv(self, a: Near, b: Near, value: float) -> Near:
        """`self + value * a / b`."""
        return self.add(a / b, alpha=value)

    def sqrt(self) -> Near:
        """Square root of what is not below zero."""
        low, exact, high = (
            (self.exact + sign * self.error).clamp_min(0.0).sqrt() for sign in (-1, 0, 1)
        )
        return self._charged(exact, torch.maximum(high - exact, exact - low), exact)

    def sign(self) -> Near:
        """Sign; any from -1 to 1 where the error leaves it open."""
        open_ = (self.exact.abs() <= self.error) & (self.error > 0)
        return Near(self.exact.sign() * ~open_, open_.to(torch.float64), self.dtype)

    def accepted(self) -> Accepted:
        """Interval of the results, each rounded to the dtype."""
        free = ~torch.isfinite(self.error)
        low = torch.where(free, -torch.inf, self.exact - self.error)
        high = torch.where(free, torch.inf, self.exact + self.error)
        return Accepted(
            value=self.exact.to(self.dtype),
            low=low.to(self.dtype),
            high=high.to(self.dtype),
            zone=free,
        )


Equation = Callable[[Any, Any, Mapping[str, Any], Mapping[str, Any]], tuple[Any, dict[str, Any]]]


def carried_contracts(world: World, equation: Equation) -> Sequence[Contract]:
    """One contract for each parameter with a gradient; the bounds of its state go on.

    Args:
        world: of the reference, right before an update.
        equation: of one parameter.
    """
    numbers = {param: at for at, param in enumerate(world.params)}
    found = []
    for group in world.torch_optimizer.param_groups:
        for param in cast("list[Tensor]", group["params"]):
            if param.grad is None:
                continue
            at = numbers[cast("torch.nn.Parameter", param)]
            state = world.bounds.get(at, {})
            new, world.bounds[at] = equation(known(param), known(param.grad), state, group)
            path = f"params[{at}]"
            found.append(Contract({path: new.accepted()}, {path: ParamPlace(at)}, follows=True))
    return found


def known(value: Tensor) -> Near:
    """A number without error."""
    exact = value.detach().to(torch.float64, copy=True)
    return Near(exact, torch.zeros_like(exact), value.dtype)
