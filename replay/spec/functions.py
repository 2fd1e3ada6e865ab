"""The functions sin, cos, tanh, ex2 and lg2, correctly rounded, in integers alone.

Each function evaluates a series in fixed point with `digits` binary places and returns a value
that is off by less than 2^(12 - digits). A result is accepted when both ends of that interval round
to the same pattern; otherwise there are more digits (Ziv's strategy).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from twinstep.replay.spec.floats import NAN, Number, encode, power, signed

Series = Callable[[Fraction, int], Fraction]


def _fixed(x: Fraction, digits: int) -> int:
    return (x.numerator << digits) // x.denominator


def _inverse_tangent(inverse: int, digits: int, alternate: bool) -> int:
    """arctan(1/n), or with `alternate` false artanh(1/n)."""
    term = total = (1 << digits) // inverse
    step, sign = 1, 1
    while term:
        term //= inverse * inverse
        step, sign = step + 2, -sign if alternate else sign
        total += sign * (term // step)
    return total


@lru_cache(None)
def pi(digits: int) -> int:
    """π in fixed point, by Machin's formula."""
    more = digits + 20
    quarter = 4 * _inverse_tangent(5, more, True) - _inverse_tangent(239, more, True)
    return 4 * quarter >> 20


@lru_cache(None)
def log_two(digits: int) -> int:
    """The logarithm of 2 in fixed point: 2 artanh(1/3)."""
    return 2 * _inverse_tangent(3, digits + 20, False) >> 20


def _exponential(y: int, digits: int) -> int:
    """e^y for fixed-point y in [0, 1)."""
    term = total = 1 << digits
    step = 1
    while term:
        term = (term * y >> digits) // step
        total, step = total + term, step + 1
    return total


def _exp2(x: Fraction, digits: int) -> Fraction:
    whole = x.numerator // x.denominator
    part = _fixed(x - whole, digits) * log_two(digits) >> digits
    return Fraction(_exponential(part, digits), 1 << digits) * power(whole)


def _log2(x: Fraction, digits: int) -> Fraction:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    mantissa = x / power(exponent)  # in (1/2, 2)
    ratio = _fixed((mantissa - 1) / (mantissa + 1), digits)
    term, total, step = ratio, ratio, 1
    while term not in (0, -1):
        term = (term * ratio >> digits) * ratio >> digits
        step += 2
        total += term // step
    return exponent + Fraction(2 * total, log_two(digits))


def _tanh(x: Fraction, digits: int) -> Fraction:
    size = abs(x)
    if size > digits:
        found = Fraction(1)
    else:
        more = digits + 8
        turns = _fixed(2 * size, more) // log_two(more)
        rest = _fixed(2 * size, more) - turns * log_two(more)
        grown = Fraction(_exponential(rest, more), 1 << more) * power(turns)
        found = (grown - 1) / (grown + 1)
    return -found if x < 0 else found


def _circular(x: Fraction, digits: int, quarter: int) -> Fraction:
    """sin(x + quarter·π/2)."""
    more = digits + max(x.numerator.bit_length() - x.denominator.bit_length(), 0) + 8
    half_pi = pi(more) >> 1
    turns, rest = divmod(_fixed(x, more), half_pi)
    y = rest >> (more - digits)
    turns = (turns + quarter) % 4
    square = y * y >> digits
    term = 1 << digits if turns % 2 else y
    total, step = term, 2 if turns % 2 else 3
    while term:
        term = (term * square >> digits) // (step * (step - 1))
        total += -term if step % 4 in (2, 3) else term
        step += 2
    return Fraction(-total if turns >= 2 else total, 1 << digits)


def rounded_once(series: Series, x: Fraction, kind: str) -> int:
    """The pattern nearest to the function's value."""
    digits = 96
    while True:
        middle, off = series(x, digits), power(12 - digits)
        low, high = middle - off, middle + off
        found = encode(signed(low, False), kind)
        if found == encode(signed(high, False), kind) and (low > 0 or high < 0):
            return found
        digits *= 2


def sine(a: Number, kind: str) -> int:
    """Sin: odd, ±0 for ±0, NaN for infinities."""
    if a.special or a.zero:
        return encode(NAN if a.special else a, kind)
    return rounded_once(lambda x, digits: _circular(x, digits, 0), a.value, kind)


def cosine(a: Number, kind: str) -> int:
    """Cos: even, 1 for ±0, NaN for infinities."""
    if a.special or a.zero:
        return encode(NAN if a.special else Number(False, Fraction(1)), kind)
    return rounded_once(lambda x, digits: _circular(x, digits, 1), a.value, kind)


def tangent(a: Number, kind: str) -> int:
    """Tanh: ±0 for ±0, ±1 for infinities."""
    if a.special == "nan" or a.zero:
        return encode(a, kind)
    if a.special or a.size > 1000:
        return encode(Number(a.negative, Fraction(1)), kind)
    return rounded_once(_tanh, a.value, kind)


def exponential(a: Number, kind: str) -> int:
    """2^a: exact for integers."""
    if a.special == "nan":
        return encode(NAN, kind)
    if a.special or a.size > 2000:
        return encode(Number(False) if a.negative else Number(False, special="inf"), kind)
    if a.value.denominator == 1:
        return encode(Number(False, power(int(a.value))), kind)
    return _small(a, kind) if a.value < -1100 else rounded_once(_scaled_exp2(a), a.value, kind)


def _small(a: Number, kind: str) -> int:
    return encode(Number(False, power(int(a.value))), kind)


def _scaled_exp2(a: Number) -> Series:
    """2^x to `digits` binary places after its own first one, so that small results end too."""
    extra = max(0, -int(a.value)) + 1
    return lambda x, digits: _exp2(x, digits + extra)


def logarithm(a: Number, kind: str) -> int:
    """log2 a: exact for powers of two, -inf for zeros, NaN below."""
    if a.zero:
        return encode(Number(True, special="inf"), kind)
    if a.special == "nan" or a.negative:
        return encode(NAN, kind)
    if a.special:
        return encode(a, kind)
    exponent = a.size.numerator.bit_length() - a.size.denominator.bit_length()
    if a.size == power(exponent):
        return encode(signed(Fraction(exponent), False), kind)
    return rounded_once(_log2, a.size, kind)


FUNCTIONS: dict[str, Callable[[Number, str], int]] = {
    "sin": sine,
    "cos": cosine,
    "tanh": tangent,
    "ex2": exponential,
    "lg2": logarithm,
}
"""By opcode family."""
