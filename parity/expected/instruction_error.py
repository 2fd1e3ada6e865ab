"""Error of the instructions of compiled code: the part of a bound that is not IEEE.

Replay computes approximate instructions correctly rounded, because the hardware's own bits are not
documented; the vendor's largest error is (PTX ISA, "Floating Point Instructions"), and a bound has
to allow for it. What the code does not contain is not charged: a kernel with `div.rn` is held to
IEEE division, one with `div.full` may be 2 ULP off in every quotient.

Without compiled code to read, `CPU` stands for C++ and torch on the CPU (IEEE, but torch's square
root may be 1 ULP off) and `UNKNOWN` for a GPU, whose code is not at hand: the usual fast division,
the fast exponential, and the fast square root, both of which flush subnormals to zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from twinstep.replay.launch.record import Launch

ULP = 2.0**-23
UPPER_WORD = 2.0**-20
"""Of a float64 instruction that writes the upper 32 bits only, 20 of them of the fraction."""


@cache
def relative_errors(*families: str) -> dict[str, float]:
    """The largest relative error of each documented instruction of some families, by its name.

    `div` and `rcp` carry out quotients, `sqrt` roots, `rsqrt` both. The others (`ex2`, `lg2`,
    `sin`, `cos`, `tanh`) are charged where a reference has a function that they carry out
    (`library_error`).
    """
    # Replay needs Triton, which not every machine with kernels for the CPU has.
    from twinstep.replay.isa.documented import CHARGES, DOCUMENTED

    found = {}
    for name in sorted(CHARGES):
        if name.partition(".")[0] in families:
            rows = [row for row in DOCUMENTED if row.charge == name and row.stated]
            # The vendor states no error for float64.
            largest = max((row.ulp * ULP + row.relative for row in rows), default=UPPER_WORD)
            found[name] = largest
    return found


LIBRARY = {
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "log2"), 1.0),
    **dict.fromkeys(("exp2", "log10", "sin", "cos", "asin", "acos", "atan", "cosh", "erf"), 2.0),
    **dict.fromkeys(("sigmoid", "tanh"), 2.0),
    **dict.fromkeys(("sinh", "asinh", "atanh", "atan2"), 3.0),
    **dict.fromkeys(("tan", "acosh", "erfc", "pow"), 4.0),
}
"""ULP that functions of fp32 may be off (CUDA C++ Programming Guide, "Mathematical Functions");
those of torch on the CPU (SLEEF, 1 ULP) are nearer."""
BY = {
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), ("ex2",)),
    **dict.fromkeys(("sigmoid", "tanh"), ("ex2", "tanh")),
    **dict.fromkeys(("erf", "erfc"), ("ex2",)),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), ("lg2",)),
    **dict.fromkeys(("asinh", "acosh", "atanh"), ("lg2",)),
    **{"pow": ("ex2",), "sin": ("sin",), "cos": ("cos",), "tan": ("sin", "cos")},
}
"""Families of approximate instructions that may carry out a function."""


def library_error(
    name: str, operand: Tensor, error: InstructionError
) -> tuple[Tensor | float, Tensor | float]:
    """The relative and the absolute error of a function at an operand.

    Args:
        name: of the function, from `LIBRARY`.
        operand: float64.
        error: names the approximate instructions that are charged.
    """
    relative: Tensor | float = LIBRARY[name] * ULP
    absolute: Tensor | float = 0.0
    for instruction in error.approximate:
        if instruction.partition(".")[0] not in BY.get(name, ()):
            continue
        own, fixed = _documented_error(instruction, operand)
        if name == "tanh":
            # 2 sigmoid(2x) - 1 has the error of a number near 1.
            fixed = fixed + own
        if name == "tan":
            # The quotient of both, near a pole as well as near a zero.
            cosine = operand.cos().abs()
            own, fixed = own + fixed / cosine, fixed / cosine
        relative, absolute = relative + own, absolute + fixed
    return relative, absolute


def _documented_error(instruction: str, operand: Tensor) -> tuple[Tensor, Tensor]:
    """Relative and absolute error of an approximate instruction; unlimited where none is stated."""
    from twinstep.replay.isa.documented import DOCUMENTED

    rows = [row for row in DOCUMENTED if row.charge == instruction and row.stated]
    relative, absolute = torch.zeros_like(operand), torch.full_like(operand, torch.inf)
    size, left = operand.abs(), torch.ones_like(operand, dtype=torch.bool)
    for row in rows:
        low, high = row.range
        here = left & (size >= low) & (size <= high)
        relative = torch.where(here, row.ulp * ULP + row.relative, relative)
        absolute = torch.where(here, row.absolute, absolute)
        left = left & ~here
    return relative, absolute


FLUSHING = {
    "add": ("add",),
    "sub": ("add",),
    "fma": ("add", "mul"),
    "mad": ("add", "mul"),
    "mul": ("mul",),
    "div": ("div",),
    "rcp": ("div",),
    "rsqrt": ("div", "sqrt"),
    "sqrt": ("sqrt",),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh"), ("function",)),
}
"""Operations of a formula that an instruction with `.ftz` carries out."""


@dataclass(frozen=True, kw_only=True)
class InstructionError:
    """Additions to the bound of each operation.

    Attributes:
        quotient: relative error of a division, above its rounding.
        root: relative error of a square root, above its rounding.
        flushed: operations (`add`, `mul`, `div`, `sqrt`, `function`) that treat subnormals as zero.
        approximate: names of the approximate instructions met.
    """

    quotient: float = 0.0
    root: float = 0.0
    flushed: frozenset[str] = field(default_factory=frozenset)
    approximate: tuple[str, ...] = ()


IEEE = InstructionError()
CPU = InstructionError(root=ULP)
UNKNOWN = InstructionError(
    quotient=2 * ULP,
    root=2 * ULP,
    flushed=frozenset({"sqrt", "function"}),
    approximate=("ex2.approx.f32",),
)


def instruction_error_of(launches: Iterable[Launch]) -> InstructionError:
    """The error of some launches on replay: by the instructions that ran, together."""
    quotients, roots = relative_errors("div", "rcp", "rsqrt"), relative_errors("sqrt", "rsqrt")
    approximate: set[str] = set()
    flushed: set[str] = set()
    for launch in launches:
        approximate.update(launch.approximations)
        for opcode in launch.opcodes:
            family, *modifiers = opcode.split(".")
            # Atomic sums of fp32 in global memory flush without saying so.
            atomic = family in ("atom", "red") and {"add", "f32"} <= set(modifiers)
            if atomic:
                flushed.add("add")
            elif "ftz" in modifiers:
                flushed.update(FLUSHING.get(family, ()))
    return InstructionError(
        quotient=max((quotients.get(name, 0.0) for name in approximate), default=0.0),
        root=max((roots.get(name, 0.0) for name in approximate), default=0.0),
        flushed=frozenset(flushed),
        approximate=tuple(sorted(approximate)),
    )
