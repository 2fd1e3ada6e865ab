"""How far the hardware's approximate instructions may be off, as the vendor documents it.

Every row was read in the PTX ISA 9.1 document (docs.nvidia.com/cuda/parallel-thread-execution), in
the section named. Errors are of the value before it is rounded into the result's format; `.ftz`
variants flush subnormal operands and results first and then obey the same row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, pi


@dataclass(frozen=True)
class Documented:
    """The maximum error of one instruction over one range.

    Attributes:
        instruction: With `.approx` or `.full` and type; braces hold an optional modifier.
        error: In the document's words: ulp, relative or absolute.
        over: The range of operands that the statement is about.
        section: Of the PTX ISA.
        ulp, relative, absolute: The same as numbers, 0.0 where not given that way.
        low, high: Magnitudes between which it holds: of the divisor for `div`, else the operand.
    """

    instruction: str
    error: str
    over: str
    section: str
    ulp: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    low: float = 0.0
    high: float = inf

    @property
    def charge(self) -> str:
        """The name under which launches count it."""
        return self.instruction.replace("{.ftz}", "").replace(".ftz", "").replace("{x2}", "")

    @property
    def stated(self) -> bool:
        """Whether the document gives a number."""
        return bool(self.ulp or self.relative or self.absolute)


_ALL, _POSITIVE = "all operands", "positive finite operands"

DOCUMENTED: tuple[Documented, ...] = (
    Documented("div.full{.ftz}.f32", "2 ulp", _ALL, "9.7.3.8 div", ulp=2),
    Documented(
        "div.approx{.ftz}.f32",
        "2 ulp",
        "divisor in [2^-126, 2^126]",
        "9.7.3.8 div",
        ulp=2,
        low=2.0**-126,
        high=2.0**126,
    ),
    Documented("rcp.approx{.ftz}.f32", "1 ulp", _ALL, "9.7.3.13 rcp", ulp=1),
    Documented("rcp.approx.ftz.f64", "not stated", _ALL, "9.7.3.14 rcp.approx.ftz.f64"),
    Documented(
        "sqrt.approx{.ftz}.f32", "2^-23 relative", _POSITIVE, "9.7.3.15 sqrt", relative=2.0**-23
    ),
    Documented(
        "rsqrt.approx{.ftz}.f32",
        "2^-22.9 relative",
        _POSITIVE,
        "9.7.3.16 rsqrt",
        relative=2.0**-22.9,
    ),
    Documented("rsqrt.approx{.ftz}.f64", "not stated", _ALL, "9.7.3.16, 9.7.3.17 rsqrt"),
    Documented(
        "sin.approx{.ftz}.f32",
        "2^-20.5 absolute",
        "[-2 pi, 2 pi]",
        "9.7.3.18 sin",
        absolute=2.0**-20.5,
        high=2 * pi,
    ),
    Documented(
        "sin.approx{.ftz}.f32",
        "2^-14.7 absolute",
        "[-100 pi, 100 pi]; none stated beyond",
        "9.7.3.18 sin",
        absolute=2.0**-14.7,
        high=100 * pi,
    ),
    Documented(
        "cos.approx{.ftz}.f32",
        "2^-20.5 absolute",
        "[-2 pi, 2 pi]",
        "9.7.3.19 cos",
        absolute=2.0**-20.5,
        high=2 * pi,
    ),
    Documented(
        "cos.approx{.ftz}.f32",
        "2^-14.7 absolute",
        "[-100 pi, 100 pi]; none stated beyond",
        "9.7.3.19 cos",
        absolute=2.0**-14.7,
        high=100 * pi,
    ),
    Documented(
        "lg2.approx{.ftz}.f32",
        "2^-22 absolute",
        "(0.5, 2)",
        "9.7.3.20 lg2",
        absolute=2.0**-22,
        low=0.5,
        high=2.0,
    ),
    Documented(
        "lg2.approx{.ftz}.f32",
        "2^-22 relative",
        "other positive finite operands",
        "9.7.3.20 lg2",
        relative=2.0**-22,
    ),
    Documented("ex2.approx{.ftz}.f32", "2 ulp", _ALL, "9.7.3.21 ex2", ulp=2),
    Documented("tanh.approx.f32", "2^-11 relative", _ALL, "9.7.3.22 tanh", relative=2.0**-11),
    Documented(
        "tanh.approx.f16{x2}", "2^-10.987 absolute", _ALL, "9.7.4.9 tanh", absolute=2.0**-10.987
    ),
    Documented("tanh.approx.bf16{x2}", "2^-8 absolute", _ALL, "9.7.4.9 tanh", absolute=2.0**-8),
    Documented("ex2.approx.f16{x2}", "2^-9.9 relative", _ALL, "9.7.4.10 ex2", relative=2.0**-9.9),
    Documented("ex2.approx.ftz.bf16{x2}", "2^-7 relative", _ALL, "9.7.4.10 ex2", relative=2.0**-7),
)
"""In order of the document's sections; the first row whose range holds an operand counts."""

CHARGES = frozenset(row.charge for row in DOCUMENTED)


def documented(charge: str, operand: float) -> Documented | None:
    """The row that speaks of an operand; None where the document says nothing.

    Args:
        charge: As in `Launch.approximations`, for instance "ex2.approx.f32".
        operand: The operand (for `div` the divisor).
    """
    size = abs(operand)
    rows = (row for row in DOCUMENTED if row.charge == charge and row.low <= size <= row.high)
    found = next(rows, None)
    return found if found is not None and found.stated else None


def markdown() -> str:
    """The table as it stands in the README."""
    lines = ["| instruction | maximum error | over | PTX ISA 9.1 |", "| --- | --- | --- | --- |"]
    lines += [f"| `{r.instruction}` | {r.error} | {r.over} | {r.section} |" for r in DOCUMENTED]
    return "\n".join(lines)
