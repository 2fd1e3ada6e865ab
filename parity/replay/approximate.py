"""Approximate instructions: computed correctly rounded, and charged.

The hardware's result may differ from ours by the documented maximum error. The launch record
counts each such instruction; `DOCUMENTED_ERROR` holds the vendor's statement (PTX ISA, section
"Floating Point Instructions"), which a bound has to add.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np

from parity.replay.dtypes import Array
from parity.replay.floating import finish
from parity.replay.half import packed, to_f16_bits
from parity.replay.operations import Operation, Unresolved, opcode
from parity.replay.rounding import bf16_to_f32, f64_to_bf16

DOCUMENTED_ERROR: dict[str, str] = {
    "div.full.f32": "2 ulp",
    "div.approx.f32": "2 ulp for a divisor magnitude in [2^-126, 2^126]",
    "rcp.approx.f32": "1 ulp",
    "rcp.approx.f64": "2^-20 relative (upper half only)",
    "sqrt.approx.f32": "2^-23 relative",
    "rsqrt.approx.f32": "2^-22.9 relative",
    "rsqrt.approx.f64": "2^-20 relative (upper half only)",
    "ex2.approx.f32": "2 ulp, 2^-22 relative",
    "lg2.approx.f32": "2^-22 absolute for an argument in (0.5, 2), else 2 ulp",
    "sin.approx.f32": "2^-20.9 absolute in [-pi, pi]",
    "cos.approx.f32": "2^-20.9 absolute in [-pi, pi]",
    "tanh.approx.f32": "2^-11 relative",
    "ex2.approx.f16": "2^-9.9 relative",
    "ex2.approx.bf16": "2^-7 relative",
    "tanh.approx.f16": "2^-10.987 absolute",
    "tanh.approx.bf16": "2^-8 absolute",
}
"""Maximum error of each approximate instruction, as the vendor states it."""

_NEAR_TIE = np.uint64(4)


def _exact_exp2(x: float) -> float:
    with localcontext() as context:
        context.prec = 60
        return float(Decimal(2) ** Decimal(x))


def _exact_log2(x: float) -> float:
    with localcontext() as context:
        context.prec = 60
        return float(Decimal(x).ln() / Decimal(2).ln())


def once(
    function: Callable[[Array], Array], exact: Callable[[float], float] | None = None
) -> Callable[[Array], Array]:
    """Evaluate in float64 and round to float32.

    Lanes whose float64 value lies within a few units of a float32 midpoint, where the library's
    own error could decide the rounding, are evaluated again with 60 decimal digits if `exact` is
    given. That value is a float64 again, now correct to half a unit: a tie-break remains open
    only for values closer to a midpoint than float64 can tell.
    """

    def rounded(x: Array) -> Array:
        wide = np.asarray(function(x.astype(np.float64)))
        if exact is not None:
            low = wide.view(np.uint64) & np.uint64((1 << 29) - 1)
            near = (low - np.uint64((1 << 28) - 4)) <= np.uint64(2) * _NEAR_TIE
            near &= np.isfinite(wide) & (wide != 0)
            if near.any():
                wide[near] = [exact(float(v)) for v in np.broadcast_to(x, wide.shape)[near]]
        return wide.astype(np.float32)

    return rounded


def _rsqrt(x: Array) -> Array:
    return np.asarray(np.where(np.isnan(x), x, 1.0 / np.sqrt(x)))


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": once(np.exp2, _exact_exp2),
    "lg2": once(np.log2, _exact_log2),
    "sin": once(np.sin),
    "cos": once(np.cos),
    "tanh": once(np.tanh),
    "rsqrt": once(_rsqrt),
}


@opcode("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")
def _approximate(parts: tuple[str, ...], count: int) -> Operation:
    family, kind = parts[0], parts[-1]
    for part in parts[1:-1]:
        if part not in ("approx", "ftz"):
            raise Unresolved(part)
    scalar = kind.removesuffix("x2")
    charge = f"{family}.approx.{scalar}"
    if charge not in DOCUMENTED_ERROR:
        raise Unresolved(kind)
    if kind == "f64":
        return Operation(_rsqrt, (kind,), (kind,), True, charge)
    if kind == "f32":
        return finish(parts, _FUNCTIONS[family], 1, charge)
    function = _half(family, scalar)
    if kind.endswith("x2"):
        return Operation(packed(function), ("u32",), ("u32",), charge=charge)
    return Operation(function, ("u16",), ("u16",), charge=charge)


def _half(family: str, kind: str) -> Callable[[Array], Array]:
    wide = {"ex2": np.exp2, "tanh": np.tanh}[family]
    if kind == "bf16":
        return lambda a: f64_to_bf16(np.asarray(wide(bf16_to_f32(a).astype(np.float64))))
    return lambda a: to_f16_bits(np.asarray(wide(a.view(np.float16).astype(np.float64))))
