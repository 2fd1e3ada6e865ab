"""Approximate instructions: computed correctly rounded, and charged.

The hardware's result may differ from ours by the documented maximum error (`documented`); the
launch record counts each such instruction, so that a bound can add it.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from math import isfinite, isqrt

import numpy as np

from twinstep.replay.dtypes import Array
from twinstep.replay.isa.floating import finish
from twinstep.replay.isa.half import packed, to_f16_bits
from twinstep.replay.isa.operations import Operation, Table
from twinstep.replay.isa.rounding import bf16_to_f32, f64_to_bf16, round_fraction

Exact = Callable[[Fraction], Fraction]
PLACES = 130
"""Decimal digits: a float32 angle has up to 39 before its point, and 60 remain after them."""


def _in_decimal(function: Callable[[Decimal], Decimal]) -> Exact:
    def evaluate(x: Fraction) -> Fraction:
        with localcontext() as context:
            context.prec = PLACES
            return Fraction(function(Decimal(x.numerator) / Decimal(x.denominator)))

    return evaluate


def _sine(x: Decimal) -> Decimal:
    """By Taylor's series, after whole turns are taken off."""
    turn = 8 * (_arctangent(5) * 4 - _arctangent(239))
    x = x.remainder_near(turn)
    term = total = x
    step = 1
    while abs(term) > Decimal(10) ** (x.adjusted() - 80):
        step += 2
        term = -term * x * x / (step * (step - 1))
        total += term
    return total


def _arctangent(inverse: int) -> Decimal:
    term = total = Decimal(1) / inverse
    for step in range(3, 2 * PLACES, 2):
        term = -term / (inverse * inverse)
        total += term / step
    return total


def _cosine(x: Decimal) -> Decimal:
    return _sine(x + 2 * (_arctangent(5) * 4 - _arctangent(239)))


def _tangent(x: Decimal) -> Decimal:
    grown = (2 * x).exp()
    return (grown - 1) / (grown + 1)


def once(function: Callable[[Array], Array], exact: Exact) -> Callable[[Array], Array]:
    """Evaluate in float64 and round to float32, correctly.

    Where the float64 value lies within a few units of a float32 midpoint, or is subnormal as a
    float32, the library's own error could decide the rounding: these are evaluated again.
    """

    def rounded(x: Array) -> Array:
        wide = np.asarray(function(x.astype(np.float64)))
        low = wide.view(np.uint64) & np.uint64((1 << 29) - 1)
        near = (low - np.uint64((1 << 28) - 8)) <= np.uint64(16)
        near |= np.abs(wide) < 2.0**-126
        near &= np.isfinite(wide) & (wide != 0) & (wide != x)
        if near.any():
            again = np.broadcast_to(x, wide.shape)[near].tolist()
            wide[near] = [round_fraction(exact(Fraction(v)), 24, -149) for v in again]
        return wide.astype(np.float32)

    return rounded


def _inverse_root(x: Array) -> Array:
    return np.asarray(np.where(np.isnan(x), x, 1.0 / np.sqrt(x)))


def _exact_inverse_root(x: Fraction) -> Fraction:
    """1/√x, cut off far below any rounding, with a last digit that says that it was."""
    return Fraction(2 * isqrt((1 << 2600) * x.denominator // x.numerator) + 1, 1 << 1301)


def _inverse_root64(x: Array) -> Array:
    """1/√x in float64, corrected where it is not the nearest."""
    result = _inverse_root(x)
    hard = np.isfinite(x) & (x > 0)
    values = np.broadcast_to(x, result.shape)[hard].tolist()
    result[hard] = [_nearest_inverse_root(v) for v in values]
    return result


def _nearest_inverse_root(x: float) -> float:
    exact, guess = Fraction(x), Fraction(1.0 / x**0.5)
    if isfinite(x) and guess * guess * exact == 1:
        return float(guess)
    return round_fraction(_exact_inverse_root(exact))


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": once(np.exp2, _in_decimal(lambda x: Decimal(2) ** x)),
    "lg2": once(np.log2, _in_decimal(lambda x: x.ln() / Decimal(2).ln())),
    "sin": once(np.sin, _in_decimal(_sine)),
    "cos": once(np.cos, _in_decimal(_cosine)),
    "tanh": once(np.tanh, _in_decimal(_tangent)),
    "rsqrt": once(_inverse_root, _exact_inverse_root),
}


def _single(parts: tuple[str, ...]) -> Operation:
    return finish(parts, _FUNCTIONS[parts[0]], 1, f"{parts[0]}.approx.f32")


def _double(parts: tuple[str, ...]) -> Operation:
    return Operation(_inverse_root64, ("f64",), ("f64",), True, f"{parts[0]}.approx.f64")


def _halves(parts: tuple[str, ...]) -> Operation:
    family, scalar = parts[0], parts[-1].removesuffix("x2")
    function, charge = _half(family, scalar), f"{family}.approx.{scalar}"
    if parts[-1] != scalar:
        return Operation(packed(function), ("u32",), ("u32",), charge=charge)
    return Operation(function, ("u16",), ("u16",), charge=charge)


def _half(family: str, kind: str) -> Callable[[Array], Array]:
    wide = {"ex2": np.exp2, "tanh": np.tanh}[family]
    if kind == "f16":
        return lambda a: to_f16_bits(np.asarray(wide(a.view(np.float16).astype(np.float64))))

    def function(a: Array) -> Array:
        bits = f64_to_bf16(np.asarray(wide(bf16_to_f32(a).astype(np.float64))))
        flushed = (family == "ex2") & ((bits & np.uint16(0x7F80)) == 0)  # ex2 has .ftz always
        return np.where(flushed, np.uint16(0), bits)

    return function


def _gross(parts: tuple[str, ...]) -> Operation:
    """`rcp` and `rsqrt.approx.ftz.f64`: only upper words count, numbers of 20 fraction bits.

    How good the approximation is the ISA leaves open; here the result is the nearest such number.
    """
    family = parts[0]

    def function(bits: Array) -> Array:
        upper = bits & np.uint64(0xFFFFFFFF << 32)
        upper = np.where((upper >> np.uint64(52)) & np.uint64(0x7FF), upper, upper & _SIGN)
        x = upper.view(np.float64)
        result = np.asarray(1.0 / x if family == "rcp" else _inverse_root(x))
        with_sign = np.where((x == 0) & np.signbit(x), -np.inf, result)
        half = np.uint64(0x7FFFFFFF) + ((with_sign.view(np.uint64) >> np.uint64(32)) & np.uint64(1))
        nearest = (with_sign.view(np.uint64) + half) & np.uint64(0xFFFFFFFF << 32)
        small = ((nearest >> np.uint64(52)) & np.uint64(0x7FF)) == 0
        nearest = np.where(small, nearest & _SIGN, nearest)
        return np.where(np.isnan(with_sign), np.uint64(0x7FFFFFFF << 32), nearest)

    return Operation(function, ("u64",), ("u64",), charge=f"{family}.approx.f64")


_SIGN = np.uint64(1 << 63)

FORMS: Table = {
    "rcp rsqrt: approx ftz | f64": _gross,
    "rsqrt: approx | f64": _double,
    "rsqrt sin cos lg2 ex2: approx ?ftz | f32": _single,
    "tanh: approx | f32": _single,
    "tanh: approx | f16,f16x2,bf16,bf16x2": _halves,
    "ex2: approx | f16,f16x2": _halves,
    "ex2: approx ftz | bf16,bf16x2": _halves,
}
