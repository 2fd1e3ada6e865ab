"""Errors of the hardware's approximate instructions, as the vendor documents them.

Every row was read in the PTX ISA 9.1 document (docs.nvidia.com/cuda/parallel-thread-execution), in
the section named. Errors are of the value before it is rounded into the result's format; `.ftz`
variants flush subnormal operands and results first and then obey the same row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, pi, pow

_TABLE = """
div.full{.ftz}.f32 | 2 ulp | all operands | 9.7.3.8 div
div.approx{.ftz}.f32 | 2 ulp | divisor in [2^-126, 2^126] | 9.7.3.8 div
rcp.approx{.ftz}.f32 | 1 ulp | all operands | 9.7.3.13 rcp
rcp.approx.ftz.f64 | not stated | all operands | 9.7.3.14 rcp.approx.ftz.f64
sqrt.approx{.ftz}.f32 | 2^-23 relative | positive finite operands | 9.7.3.15 sqrt
rsqrt.approx{.ftz}.f32 | 2^-22.9 relative | positive finite operands | 9.7.3.16 rsqrt
rsqrt.approx{.ftz}.f64 | not stated | all operands | 9.7.3.16, 9.7.3.17 rsqrt
sin.approx{.ftz}.f32 | 2^-20.5 absolute | [-2 pi, 2 pi] | 9.7.3.18 sin
sin.approx{.ftz}.f32 | 2^-14.7 absolute | [-100 pi, 100 pi]; none stated beyond | 9.7.3.18 sin
cos.approx{.ftz}.f32 | 2^-20.5 absolute | [-2 pi, 2 pi] | 9.7.3.19 cos
cos.approx{.ftz}.f32 | 2^-14.7 absolute | [-100 pi, 100 pi]; none stated beyond | 9.7.3.19 cos
lg2.approx{.ftz}.f32 | 2^-22 absolute | (0.5, 2) | 9.7.3.20 lg2
lg2.approx{.ftz}.f32 | 2^-22 relative | other positive finite operands | 9.7.3.20 lg2
ex2.approx{.ftz}.f32 | 2 ulp | all operands | 9.7.3.21 ex2
tanh.approx.f32 | 2^-11 relative | all operands | 9.7.3.22 tanh
tanh.approx.f16{x2} | 2^-10.987 absolute | all operands | 9.7.4.9 tanh
tanh.approx.bf16{x2} | 2^-8 absolute | all operands | 9.7.4.9 tanh
ex2.approx.f16{x2} | 2^-9.9 relative | all operands | 9.7.4.10 ex2
ex2.approx.ftz.bf16{x2} | 2^-7 relative | all operands | 9.7.4.10 ex2
"""
"""Instruction (braces hold an optional modifier), maximum error, range, section of the PTX ISA."""

_RANGES = {
    "divisor in [2^-126, 2^126]": (2.0**-126, 2.0**126),
    "[-2 pi, 2 pi]": (0.0, 2 * pi),
    "[-100 pi, 100 pi]; none stated beyond": (0.0, 100 * pi),
    "(0.5, 2)": (0.5, 2.0),
}


@dataclass(frozen=True)
class Documented:
    """The maximum error of one instruction over one range.

    Attributes:
        instruction: With `.approx` or `.full` and type; braces hold an optional modifier.
        error: In the document's words: ulp, relative, absolute, or that it is not stated.
        over: The range of operands that the statement is about.
        section: Of the PTX ISA.
    """

    instruction: str
    error: str
    over: str
    section: str

    @property
    def charge(self) -> str:
        """The name under which launches count it."""
        return self.instruction.replace("{.ftz}", "").replace(".ftz", "").replace("{x2}", "")

    @property
    def stated(self) -> bool:
        """True if the document gives a number."""
        return self.error != "not stated"

    def number(self, unit: str) -> float:
        """The error as a number, where it is given in this unit; else 0.0."""
        size, _, own = self.error.partition(" ")
        if own != unit:
            return 0.0
        base, _, exponent = size.partition("^")
        return pow(float(base), float(exponent or 1))

    @property
    def ulp(self) -> float:
        """The error in units in the last place; 0.0 where not given so."""
        return self.number("ulp")

    @property
    def relative(self) -> float:
        """The error relative to the result; 0.0 where not given so."""
        return self.number("relative")

    @property
    def absolute(self) -> float:
        """The absolute error; 0.0 where not given so."""
        return self.number("absolute")

    @property
    def range(self) -> tuple[float, float]:
        """The magnitudes of operands (of `div` the divisor) that it is about."""
        return _RANGES.get(self.over, (0.0, inf))

    def holds(self, size: float) -> bool:
        """True if it is about an operand (of `div` the divisor) of this magnitude."""
        low, high = self.range
        return low <= size <= high


DOCUMENTED = tuple(Documented(*line.split(" | ")) for line in _TABLE.strip().splitlines())
"""In order of the document's sections; the first row whose range holds an operand counts."""

CHARGES = frozenset(row.charge for row in DOCUMENTED)


def documented(charge: str, operand: float) -> Documented | None:
    """The row that speaks of an operand; None where the document says nothing.

    Args:
        charge: As in `Launch.approximations`, for instance "ex2.approx.f32".
        operand: The operand (for `div` the divisor).
    """
    rows = (row for row in DOCUMENTED if row.charge == charge and row.holds(abs(operand)))
    found = next(rows, None)
    return found if found is not None and found.stated else None


def markdown() -> str:
    """The table as it stands in the README."""
    lines = ["| instruction | maximum error | over | PTX ISA 9.1 |", "| --- | --- | --- | --- |"]
    lines += [f"| `{r.instruction}` | {r.error} | {r.over} | {r.section} |" for r in DOCUMENTED]
    return "\n".join(lines)
