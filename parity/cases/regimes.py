"""Values by regime: what makes two honest implementations differ, not what training looks like.

All lists of a case share the regime of an element, because the interesting cases are joint ones:
eps matters only where the second moment is tiny, cancellation only where two arguments fit
together. `mixture` gives every element a regime of its own, so that a single case of some thousand
elements covers them all. None of these plants a non-finite value except `planted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinstep.parity.cases.formats import (
    FORMATS,
    Bits,
    extreme_bits,
    finite_bits,
    subnormal_bits,
    to_bits,
)
from twinstep.parity.operations.operation import Role

Reals = NDArray[np.float64]
Codes = NDArray[np.int64]

FINITE = ("ordinary", "zeros", "subnormal", "extreme", "ties", "cancelling", "tiny_root", "bits")
REGIMES = ("mixture", *FINITE, "planted")
BY_BITS = {
    FINITE.index("subnormal"): subnormal_bits,
    FINITE.index("extreme"): extreme_bits,
    FINITE.index("bits"): finite_bits,
}


@dataclass(frozen=True)
class Values:
    """Intended values of one element range, by role, in float64 before rounding to a dtype."""

    param: Reals
    grad: Reals
    moment: Reals
    square: Reals

    def of(self, role: Role) -> Reals:
        """The values for lists of this role; an output starts as a stale copy of the weights."""
        by_role = {Role.GRAD: self.grad, Role.MOMENT: self.moment, Role.SQUARE: self.square}
        by_role[Role.SCALE] = np.abs(self.moment)
        if role is Role.OUTPUT:
            return self.param * 1.02
        return by_role.get(role, self.param)


def codes_of(regime: str, rng: np.random.Generator, count: int) -> Codes:
    """The regime of each element, an index into `FINITE`; a mixture has all in any 15 running."""
    if regime == "mixture":
        rounds = np.tile(np.arange(len(FINITE)), (-(-count // len(FINITE)), 1))
        return rng.permuted(rounds, axis=1).reshape(-1)[:count]
    return np.full(count, FINITE.index("ordinary" if regime == "planted" else regime))


def values(codes: Codes, rng: np.random.Generator, controls: Mapping[str, float]) -> Values:
    """Intended values for elements with these regimes, fitting the controls."""
    count = codes.shape[0]
    factor = abs(controls.get("factor", 1.0)) or 1.0
    normal = rng.standard_normal((4, count))
    # Half of the cases hold magnitudes alike, so that no single element decides a sum.
    spread = float(rng.choice([0.3, 6.0]))
    unscaled = normal[1] * 10.0 ** rng.uniform(-spread, 0, count)
    param = normal[0] * 10.0 ** rng.uniform(-3, 1, count)
    moment = normal[2] * np.abs(unscaled)
    square = unscaled**2 * rng.uniform(0.0, 2.0, count)
    for name, change in _CHANGES.items():
        chosen = codes == FINITE.index(name)
        if chosen.any():
            rows = (param, unscaled, moment, square)
            changed = change(rng, [row[chosen] for row in rows], controls)
            for row, new in zip(rows, changed, strict=True):
                row[chosen] = new
    return Values(param, np.clip(unscaled / factor, -6e4, 6e4), moment, np.abs(square))


def overlay_bits(
    rounded: Bits, codes: Codes, rng: np.random.Generator, role: Role, form_name: str
) -> Bits:
    """Replace the elements whose regime is a matter of bits of their own format."""
    form = next(form for form in FORMATS.values() if form.name == form_name)
    bits = rounded.copy()
    for code, draw in BY_BITS.items():
        chosen = codes == code
        if chosen.any():
            bits[chosen] = draw(rng, int(chosen.sum()), form)
    if role in (Role.SQUARE, Role.SCALE):
        bits &= form.unsigned(form.sign - 1)
    return bits


def _zeros(
    rng: np.random.Generator, rows: list[Reals], controls: Mapping[str, float]
) -> list[Reals]:
    """Both zeros, everywhere."""
    return [np.copysign(0.0, rng.standard_normal(row.shape[0])) for row in rows]


def _ties(
    rng: np.random.Generator, rows: list[Reals], controls: Mapping[str, float]
) -> list[Reals]:
    """Weights halfway between two neighbours of bf16 or fp16, with nothing that moves them.

    Some lie where fp16 begins to be infinite, at 65520, or just below; some halfway between two
    subnormal numbers.
    """
    count = rows[0].shape[0]
    top = rng.integers(0x38000000, 0x47000000, count).astype(np.uint32)
    half = np.where(rng.integers(0, 2, count) == 0, 0x8000, 0x1000).astype(np.uint32)
    below = half * np.uint32(2) - np.uint32(1)
    beside = rng.choice(np.array([0, 0, 1, -1]), count)
    weights = ((top & ~below) | half).view(np.float32).astype(np.float64)
    weights = np.where(beside == 0, weights, np.nextafter(weights.astype(np.float32), beside))
    edge = 65520.0 - rng.choice([-1, 0, 1, 1, 1], count) * 2.0 ** rng.integers(-8, 5, count)
    kind = rng.integers(0, 8, count)
    odd = (2 * (top >> 7 & 0x3FF) + 1) % np.where(half == 0x8000, 256, 2048)
    least = np.where(half == 0x8000, 2.0**-134, 2.0**-25)
    weights = np.where(kind == 0, edge, np.where(kind == 1, odd * least, weights))
    return [weights * rng.choice([-1.0, 1.0], count), *_zeros(rng, rows[1:], controls)]


def _cancelling(
    rng: np.random.Generator, rows: list[Reals], controls: Mapping[str, float]
) -> list[Reals]:
    """New first moment near zero, or a weight about as large as its own update."""
    _, grad, _, square = rows
    beta1 = controls.get("beta1", controls.get("momentum", 0.5))
    nudge = 1.0 + rng.uniform(-1e-6, 1e-6, grad.shape[0])
    moment = -grad * (1.0 - beta1) / max(beta1, 1e-3) * nudge
    lr, eps = controls.get("lr", 0.1), max(controls.get("eps", 1e-3), 1e-12)
    small = lr * moment / (np.sqrt(square) + eps) * nudge
    param = np.where(rng.integers(0, 2, grad.shape[0]) == 0, small, -grad * nudge)
    return [param, grad, moment, square]


def _tiny_root(
    rng: np.random.Generator, rows: list[Reals], controls: Mapping[str, float]
) -> list[Reals]:
    """Second moment whose root is about eps, first moment of the same size, still gradients."""
    count = rows[0].shape[0]
    eps = max(controls.get("eps", 1e-3), 1e-12)
    root = eps * 2.0 ** rng.uniform(-4, 4, count)
    moment = root * rng.standard_normal(count)
    return [rows[0] * 1e-2, moment * 1e-3, moment, root**2]


_CHANGES = {
    "zeros": _zeros,
    "ties": _ties,
    "cancelling": _cancelling,
    "tiny_root": _tiny_root,
}


def round_to_bits(reals: Reals, form_name: str) -> Bits:
    """Round float64 values to the format, saturating at its largest finite number."""
    import torch

    form = next(form for form in FORMATS.values() if form.name == form_name)
    top = torch.finfo(form.dtype).max
    rounded = torch.from_numpy(np.clip(reals, -top, top)).to(form.dtype)
    return to_bits(rounded)
