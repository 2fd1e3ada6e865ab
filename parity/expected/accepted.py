"""Accepted content of one tensor: one value, or an interval of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinstep.parity.cases.formats import FORMATS, widened
from twinstep.parity.expected.ulp import same, ulp_distance

PARTS = ("value", "low", "high", "exact", "bound", "zone")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Accepted interval of one output tensor.

    Attributes:
        value: what the reference returned.
        low: smallest accepted value, in the tensor's dtype; None: `value` alone, bit for bit.
        high: largest accepted value.
        exact: the real-valued result, float64, before the last rounding.
        bound: how far from `exact` a result may be before that rounding, float64.
        zone: where the order of operations decides between a finite and a non-finite result, so
            that both are accepted.
    """

    value: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    exact: Tensor | None = None
    bound: Tensor | None = None
    zone: Tensor | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Accepted:
        """The interval with all elements moved alike, as by a slice or a repetition.

        Args:
            move: makes a tensor of other elements of the one that it is given.
        """

        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else move(x)

        ends = map(part, (self.low, self.high, self.exact, self.bound, self.zone))
        low, high, exact, bound, zone = ends
        return Accepted(
            value=move(self.value), low=low, high=high, exact=exact, bound=bound, zone=zone
        )

    def accepts(self, got: Tensor) -> Tensor:
        """Mask of the elements of `got` (same dtype and shape) that are acceptable."""
        if self.low is None or self.high is None or self.zone is None:
            return same(got, self.value)
        wide, low, high = widened(got), widened(self.low), widened(self.high)
        inside = (wide >= low) & (wide <= high)
        nan_too = torch.isnan(wide) & torch.isnan(widened(self.value))
        return inside | nan_too | (self.zone & ~torch.isfinite(wide))

    def ratio(self, got: Tensor) -> Tensor | None:
        """Error over bound, where both mean something; None without a bound.

        The error is counted from the nearest value that rounds to `got`, so that an output of
        few bits is not charged with its own rounding.
        """
        if self.exact is None or self.bound is None or self.low is None or self.high is None:
            return None
        wide = got.to(torch.float64)
        edge = torch.where(wide > self.exact, _below(got), _above(got))
        # Between `edge` and `got` every real number rounds to `got`.
        nearest = torch.where((self.exact - edge) * (self.exact - wide) <= 0, self.exact, edge)
        error = (nearest - self.exact).abs()
        ratio = error / self.bound.clamp_min(torch.finfo(torch.float64).tiny)
        meaningful = torch.isfinite(ratio) & torch.isfinite(wide) & ~self.zone_or_none(got)
        return torch.where(meaningful & (error > 0), ratio, torch.zeros_like(ratio))

    def errors(self, got: Tensor) -> Tensor:
        """Error in units of its bound, in ULP without one; of integers the difference; flat.

        Infinite where one of the two is NaN, or infinite in spite of a bound.
        """
        flat, want = got.reshape(-1), self.value.reshape(-1)
        if flat.dtype not in FORMATS:
            return (flat.double() - want.double()).abs()
        ratio = self.ratio(got)
        if ratio is not None:
            wild = flat.double().isfinite() != want.double().isfinite()
            return torch.where(wild, torch.inf, ratio.reshape(-1))
        steps = ulp_distance(flat, want).double()
        return torch.where(steps < 0, torch.inf, steps)

    def nearness(self, got: Tensor) -> Tensor:
        """Score for a search where few bits hide the error: bound over distance to a tie.

        Between 0 (far from every tie, or nothing is hidden) and 1e-2; flat. From a tie an error
        within the bound shows, and only there.
        """
        flat = torch.zeros(got.numel(), dtype=torch.float64)
        if self.exact is None or self.bound is None or got.itemsize in (1, 4):
            return flat
        exact, bound = self.exact.reshape(-1), self.bound.reshape(-1)
        rounded = self.exact.to(got.dtype)
        ties = (_below(rounded).reshape(-1), _above(rounded).reshape(-1))
        gap = torch.minimum((exact - ties[0]).abs(), (exact - ties[1]).abs())
        near = (bound / gap.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(10.0)
        usable = torch.isfinite(near) & ~self.zone_or_none(got).reshape(-1)
        return torch.where(usable, near * 1e-3, flat)

    def zone_or_none(self, got: Tensor) -> Tensor:
        """The zone, or nowhere."""
        return torch.zeros_like(got, dtype=torch.bool) if self.zone is None else self.zone


def joined(rows: Sequence[tuple[Accepted, Tensor]]) -> list[tuple[Accepted, Tensor]]:
    """Tensors of like kind one behind the other, flat, as one: of a thousand, one look at all.

    Args:
        rows: what is accepted, and what there is.
    """
    kinds: dict[object, list[int]] = {}
    for at, (accepted, got) in enumerate(rows):
        absent = (getattr(accepted, name) is None for name in PARTS)
        kinds.setdefault((got.dtype, accepted.value.dtype, *absent), []).append(at)

    def flat(name: str, of: list[int]) -> Tensor | None:
        if getattr(rows[of[0]][0], name) is None:
            return None
        return torch.cat([getattr(rows[at][0], name).expand_as(rows[at][1]).ravel() for at in of])

    return [
        (
            Accepted(**{name: flat(name, of) for name in PARTS}),  # type: ignore[arg-type]
            torch.cat([rows[at][1].ravel() for at in of]),
        )
        for of in kinds.values()
    ]


def _below(got: Tensor) -> Tensor:
    """Midpoint between a value and its lower neighbour, in float64 (fp32: the value itself)."""
    return _midpoint(got, -torch.inf)


def _above(got: Tensor) -> Tensor:
    return _midpoint(got, torch.inf)


def _midpoint(got: Tensor, towards: float) -> Tensor:
    wide = got.to(torch.float64)
    if got.dtype == torch.float32:
        return wide
    return (wide + _neighbour(got, towards).to(torch.float64)) / 2


def _neighbour(got: Tensor, towards: float) -> Tensor:
    """The next number up or down."""
    if got.itemsize > 1:
        return torch.nextafter(got, torch.full_like(got, towards))
    # torch has no such function for 8-bit floats: their bits are in order, below zero backwards.
    up = (widened(got) > 0) == (towards > 0)
    bits = got.contiguous().view(torch.int8)
    stepped = torch.where(up, bits + 1, bits - 1)
    smallest = torch.full_like(bits, 1 if towards > 0 else -127)
    return torch.where(widened(got) == 0, smallest, stepped).view(got.dtype)
