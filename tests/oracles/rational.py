"""IEEE arithmetic in rational numbers: an independent truth for the reference.

Nothing here uses floating-point arithmetic. A result is computed as a fraction and rounded once, to
nearest, ties to even. Slow and short on purpose; it covers finite values only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format.

    Attributes:
        precision: bits of the significand, the implicit one included.
        min_exponent: exponent of the smallest normal number.
        max_exponent: exponent of the largest finite number.
    """

    precision: int
    min_exponent: int
    max_exponent: int


FP16 = Format(precision=11, min_exponent=-14, max_exponent=15)
BF16 = Format(precision=8, min_exponent=-126, max_exponent=127)
FP32 = Format(precision=24, min_exponent=-126, max_exponent=127)
FP64 = Format(precision=53, min_exponent=-1022, max_exponent=1023)


def rounded(x: Fraction, to: Format) -> float:
    """Round x to nearest, ties to even; values past the largest finite number become infinite.

    >>> rounded(Fraction(1, 3), FP16) == 0x555 / 2**12
    True
    >>> rounded(Fraction(2**24 + 1), FP32) == 2**24
    True
    """
    if x == 0:
        return 0.0
    quantum = _two_to(max(_exponent(x), to.min_exponent) - to.precision + 1)
    value = round(x / quantum) * quantum
    if abs(value) >= _two_to(to.max_exponent + 1):
        return math.copysign(math.inf, x)
    return float(value)


def rounded_root(x: Fraction, to: Format) -> float:
    """Round the square root of x >= 0 once.

    The root is cut off 64 bits below the precision and a sticky bit tells whether anything was cut
    off, which is all that rounding needs to know.
    """
    if x == 0:
        return 0.0
    shift = max(0, 2 * (to.precision + 64) - _exponent(x))
    shift += shift % 2
    scaled = x * _two_to(shift)
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    sticky = 0 if whole * whole == scaled else 1
    return rounded(Fraction(2 * whole + sticky) / _two_to(shift // 2 + 1), to)


def _two_to(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _exponent(x: Fraction) -> int:
    """Largest e with 2^e <= abs(x)."""
    guess = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return guess if _two_to(guess) <= abs(x) else guess - 1


def r32(x: Fraction) -> Fraction:
    """The fp32 number next to x."""
    return Fraction(rounded(x, FP32))


def r64(x: Fraction) -> Fraction:
    """The float64 number next to x."""
    return Fraction(rounded(x, FP64))


def power(beta: float, t: int) -> Fraction:
    """beta^t in float64, by square and multiply."""
    result, square = Fraction(1), Fraction(beta)
    while t:
        if t & 1:
            result = r64(result * square)
        square, t = r64(square * square), t >> 1
    return result


def norm(values: list[Fraction]) -> Fraction:
    """Root of the exact sum of squares: float64, then fp32."""
    total = r64(sum((x * x for x in values), Fraction(0)))
    return r32(Fraction(rounded_root(total, FP64)))
