"""The meaning of floating-point instructions, in exact rational arithmetic on single values.

The independent statement that the conformance suite holds `floating`, `half`, `convert` and
`compare` against: no NumPy, no machine floats. A value is a bit pattern (int) of a format; it is
decoded to a `Number`, computed on with `Fraction`, and encoded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt

FORMATS = {
    **{"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "upper": (11, 20)},
    **{"e4m3": (4, 3), "e5m2": (5, 2)},
}
"""Exponent bits and fraction bits of each format; "upper" is the upper word of an f64."""


@dataclass(frozen=True)
class Number:
    """A floating-point datum: sign (for zeros and infinities too), magnitude or special."""

    negative: bool
    size: Fraction = Fraction(0)
    special: str = ""  # "nan", "inf" or ""

    @property
    def value(self) -> Fraction:
        """The signed value of a finite number."""
        return -self.size if self.negative else self.size

    @property
    def zero(self) -> bool:
        """True for a zero of either sign."""
        return not self.special and self.size == 0


NAN = Number(False, special="nan")


def first_special(kind: str) -> int:
    """The least pattern that is no finite number: infinity, or NaN in e4m3, which has no other."""
    exponent_bits, fraction_bits = FORMATS[kind]
    if kind == "e4m3":
        return (1 << (exponent_bits + fraction_bits)) - 1
    return ((1 << exponent_bits) - 1) << fraction_bits


@lru_cache(1 << 18)
def decode(bits: int, kind: str) -> Number:
    """The datum of a bit pattern."""
    exponent_bits, fraction_bits = FORMATS[kind]
    negative = bool(bits >> (exponent_bits + fraction_bits))
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    if (exponent << fraction_bits | fraction) >= first_special(kind):
        return Number(negative, special="nan") if fraction else Number(negative, special="inf")
    bias = (1 << (exponent_bits - 1)) - 1
    whole = fraction if exponent == 0 else fraction | 1 << fraction_bits
    return Number(negative, Fraction(whole) * power(max(exponent, 1) - bias - fraction_bits))


@lru_cache(None)
def power(exponent: int) -> Fraction:
    """2 to an integer power."""
    return Fraction(2) ** exponent


def canonical_nan(kind: str) -> int:
    """All ones but the sign; for f64 the quiet NaN without payload."""
    exponent_bits, fraction_bits = FORMATS[kind]
    if kind == "f64":
        return 0x7FF8 << 48
    return (1 << (exponent_bits + fraction_bits)) - 1


def encode(number: Number, kind: str, mode: str = "rn") -> int:
    """The bit pattern of a datum, rounded once in a mode."""
    exponent_bits, fraction_bits = FORMATS[kind]
    sign = int(number.negative) << (exponent_bits + fraction_bits)
    infinity = first_special(kind)
    if number.special == "nan":
        return canonical_nan(kind)
    if number.special == "inf":
        return sign | infinity
    if number.size == 0:
        return sign
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = number.size.numerator.bit_length() - number.size.denominator.bit_length()
    exponent -= int(number.size < power(exponent))
    exponent = max(exponent, 1 - bias)
    scaled = number.size / power(exponent - fraction_bits)
    whole = rounded(scaled, number.negative, mode)
    # Exponent and fraction form one integer, so a carry moves to the next binade by itself.
    pattern = whole + ((exponent + bias - 1) << fraction_bits)
    if pattern >= infinity:
        toward_zero = mode == "rz" or mode == ("rp" if number.negative else "rm")
        pattern = infinity - 1 if toward_zero else infinity
    return sign | pattern


def rounded(size: Fraction, negative: bool, mode: str) -> int:
    """A magnitude as an integer: rn nearest even, rz down, rm and rp by sign."""
    whole, rest = divmod(size, 1)
    count = int(whole)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2 == 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    return count + int(up)


def signed(value: Fraction, negative_zero: bool) -> Number:
    """A finite result; an exact zero has the given sign."""
    return Number(value < 0 or (value == 0 and negative_zero), abs(value))


def total(a: Number, b: Number, mode: str) -> Number:
    """A + b."""
    if "nan" in (a.special, b.special):
        return NAN
    if a.special and b.special:
        return a if a.negative == b.negative else NAN
    if a.special or b.special:
        return a if a.special else b
    both = a.negative and b.negative
    return signed(a.value + b.value, both or (a.negative != b.negative and mode == "rm"))


def product(a: Number, b: Number) -> Number:
    """A · b."""
    negative = a.negative != b.negative
    if "nan" in (a.special, b.special) or (a.special and b.zero) or (b.special and a.zero):
        return NAN
    if a.special or b.special:
        return Number(negative, special="inf")
    return Number(negative, a.size * b.size)


def quotient(a: Number, b: Number) -> Number:
    """A / b."""
    negative = a.negative != b.negative
    if "nan" in (a.special, b.special) or (a.special and b.special) or (a.zero and b.zero):
        return NAN
    if a.special or b.zero:
        return Number(negative, special="inf")
    if b.special:
        return Number(negative)
    return Number(negative, a.size / b.size)


def root(a: Number) -> Number:
    """√a, with enough digits and a sticky one that any rounding is right."""
    if a.zero:
        return a
    if a.special == "nan" or a.negative:
        return NAN
    if a.special:
        return a
    shift = 1300
    whole = int(a.size * power(2 * shift))
    floor = isqrt(whole)
    exact = floor * floor == a.size * power(2 * shift)
    return Number(False, Fraction(2 * floor + (not exact)) / power(shift + 1))


def extremum(a: Number, b: Number, smaller: bool, propagate: bool) -> Number:
    """Min or max, -0 below +0; a NaN loses, or wins with `propagate`."""
    if a.special == "nan" or b.special == "nan":
        if propagate:
            return NAN
        return b if a.special == "nan" else a
    return min(a, b, key=order) if smaller else max(a, b, key=order)


def order(a: Number) -> tuple[int, Fraction, int]:
    """A sort key in which -inf < finite < +inf and -0 < +0."""
    if a.special:
        return (-1 if a.negative else 1, Fraction(0), 0)
    return (0, a.value, 0 if a.negative else 1)


def compare(name: str, a: Number, b: Number) -> bool:
    """A comparison by its PTX name."""
    unordered = "nan" in (a.special, b.special)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if unordered:
        return name.endswith("u")
    left, right = order(a)[:2], order(b)[:2]
    relation = name.removesuffix("u") if name not in ("equ", "neu") else name[:2]
    if relation in ("eq", "ne"):
        return (left == right) == (relation == "eq")
    if relation in ("lt", "ge"):
        return (left < right) == (relation == "lt")
    return (right < left) == (relation == "gt")


def flushed(a: Number, kind: str) -> Number:
    """Subnormals as zeros of the same sign."""
    exponent_bits, _ = FORMATS[kind]
    smallest = power(2 - (1 << (exponent_bits - 1)))
    return Number(a.negative) if not a.special and a.size < smallest else a


def arithmetic(opcode: str, bits: tuple[int, ...]) -> int:
    """The result bits of add, sub, mul, fma, div, sqrt, rcp, min, max, abs and neg."""
    family, *modifiers, kind = opcode.split(".")
    mode = next((m for m in modifiers if m in ("rn", "rz", "rm", "rp")), "rn")
    width = sum(FORMATS[kind]) + 1
    if family in ("abs", "neg") and kind in ("f16", "bf16"):
        sign = 1 << (width - 1)
        if "ftz" in modifiers and flushed(decode(bits[0], kind), kind).zero:
            bits = (bits[0] & sign,)
        return bits[0] & (sign - 1) if family == "abs" else bits[0] ^ sign
    numbers = [decode(b, kind) for b in bits]
    if "ftz" in modifiers:
        numbers = [flushed(n, kind) for n in numbers]
    result = _result(family, modifiers, mode, numbers)
    if "relu" in modifiers and result.special != "nan" and result.negative:
        result = Number(False)
    if "sat" in modifiers:
        result = _saturated(result)
    pattern = encode(result, kind, mode)
    if "ftz" in modifiers:
        return encode(flushed(decode(pattern, kind), kind), kind)
    return pattern


def _result(family: str, modifiers: list[str], mode: str, numbers: list[Number]) -> Number:
    a = numbers[0]
    if family in ("sqrt", "abs", "neg", "rcp"):
        if family == "rcp":
            return quotient(Number(False, Fraction(1)), a)
        negated = Number(not a.negative, a.size, a.special)
        plain = Number(False, a.size, a.special)
        return root(a) if family == "sqrt" else (plain if family == "abs" else negated)
    b = numbers[1]
    if family in ("min", "max"):
        negative = a.negative != b.negative
        if "abs" in modifiers:
            a, b = Number(False, a.size, a.special), Number(False, b.size, b.special)
        found = extremum(a, b, family == "min", "NaN" in modifiers)
        return Number(negative, found.size, found.special) if "xorsign" in modifiers else found
    if family == "fma":
        return total(product(a, b), numbers[2], mode)
    if family == "sub":
        b = Number(not b.negative, b.size, b.special)
    if family in ("add", "sub"):
        return total(a, b, mode)
    return product(a, b) if family == "mul" else quotient(a, b)


def _saturated(a: Number) -> Number:
    """Into [0, 1]; NaN becomes +0."""
    if a.special == "nan" or a.negative:
        return Number(False)
    return Number(False, Fraction(1)) if a.special or a.size > 1 else a


def convert(opcode: str, bits: int) -> int:
    """The result bits of a cvt between scalars."""
    _, *modifiers, target, source = opcode.split(".")
    mode = next((m for m in modifiers if m in ("rn", "rz", "rm", "rp")), "rn")
    if source not in FORMATS:
        value = integer(bits, source)
        if target in FORMATS:
            number = signed(Fraction(value), False)
            return encode(_saturated(number) if "sat" in modifiers else number, target, mode)
        return wrapped(clamped(value, target) if "sat" in modifiers else value, target)
    integral = next((m[:2] for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")), "")
    if target not in FORMATS:
        if "ftz" in modifiers:
            bits = encode(flushed(decode(bits, source), source), source)
        return to_integer(bits, source, target, integral or "rz")
    number = decode(bits, source)
    if "ftz" in modifiers and source == "f32":
        number = flushed(number, source)
    if integral and not number.special:
        number = Number(number.negative, Fraction(rounded(number.size, number.negative, integral)))
    if "relu" in modifiers and number.special != "nan" and number.negative:
        number = Number(False)
    if "sat" in modifiers:
        number = _saturated(number)
    pattern = encode(number, target, mode)
    if "satfinite" in modifiers and number.special != "nan" and decode(pattern, target).special:
        pattern -= 1
    if "ftz" in modifiers and target == "f32":
        return encode(flushed(decode(pattern, target), target), target)
    return pattern


def to_integer(bits: int, source: str, target: str, mode: str) -> int:
    """A float as an integer: rounded, saturated; NaN by the ISA's rule."""
    value = whole_number(bits, source, mode)
    if value is None:
        wide = source == "f64" or target.endswith("64")
        return 1 << (int(target[1:]) - 1) if wide else 0
    return wrapped(clamped(value, target), target)


@lru_cache(1 << 20)
def whole_number(bits: int, kind: str, mode: str) -> int | None:
    """A float rounded to an unbounded integer; infinities are huge, NaN is None."""
    number = decode(bits, kind)
    if number.special == "nan":
        return None
    size = 1 << 80 if number.special else rounded(number.size, number.negative, mode)
    return -size if number.negative else size


def integer(bits: int, kind: str) -> int:
    """The value of an integer pattern."""
    width = int(kind[1:])
    bits &= (1 << width) - 1
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def clamped(value: int, kind: str) -> int:
    """The nearest value that a type holds."""
    width = int(kind[1:])
    low, high = 0, (1 << width) - 1
    if kind[0] == "s":
        low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
    return max(low, min(high, value))


def wrapped(value: int, kind: str) -> int:
    """The bit pattern of a value modulo the width."""
    return value & ((1 << int(kind[1:])) - 1)


def inverse_root(a: Number) -> Number:
    """1/√a; -inf for -0."""
    if a.zero:
        return Number(a.negative, special="inf")
    if a.special == "inf":
        return NAN if a.negative else Number(False)
    return root(quotient(Number(False, Fraction(1)), a))


def quick_quotient(opcode: str, a: int, b: int) -> int:
    """div.approx.f32: a/b, but for 2^126 < |b| < 2^128 zero (NaN for an infinite a)."""
    divisor, dividend = decode(b, "f32"), decode(a, "f32")
    if divisor.special or divisor.size <= power(126) or dividend.special == "nan":
        return arithmetic(opcode, (a, b))
    if dividend.special:
        return canonical_nan("f32")
    return encode(Number(divisor.negative != dividend.negative), "f32")


def gross(family: str, bits: int) -> int:
    """`rcp` and `rsqrt.approx.ftz.f64`: the upper word alone, with its 20 fraction bits."""
    number = flushed(decode(bits >> 32, "upper"), "upper")
    if number.special == "nan":
        return 0x7FFFFFFF << 32
    one = Number(False, Fraction(1))
    found = quotient(one, number) if family == "rcp" else inverse_root(number)
    return encode(flushed(found, "upper"), "upper") << 32


def tf32(bits: int, mode: str, *modifiers: str) -> int:
    """f32 with 10 fraction bits: rn to even, rna away from zero at ties, rz down."""
    number = decode(bits, "f32")
    if number.special == "nan":
        return canonical_nan("f32")
    if "relu" in modifiers and number.negative:
        return 0
    size, step = bits & 0x7FFFFFFF, 1 << 13
    largest = (0xFF << 23) - step
    if "satfinite" in modifiers and size > largest:
        return bits & 1 << 31 | largest
    if number.special:
        return bits
    down, rest = divmod(size, step)
    tie_up = down % 2 == 1 if mode == "rn" else mode == "rna"
    up = mode != "rz" and (rest > step // 2 or (rest == step // 2 and tie_up))
    return bits & 1 << 31 | (down + up) * step
