"""What the instructions of compiled code cost in accuracy: the part of a bound that is not IEEE.

Replay computes approximate instructions correctly rounded, because the hardware's own bits are not
documented; the vendor's largest error is (PTX ISA, "Floating Point Instructions"), and a bound has
to allow for it. What the code does not contain is not charged: a kernel with `div.rn` is held to
IEEE division, one with `div.full` may be 2 ULP off in every quotient.

Without compiled code to read, `CPU` stands for C++ and torch on the CPU (IEEE, but torch's square
root may be 1 ULP off) and `UNKNOWN` for a GPU, whose code is not at hand: the usual fast division
and the fast square root, which flushes subnormals to zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinstep.replay.launch.record import Launch

ULP = 2.0**-23
UPPER_WORD = 2.0**-20
"""Of a float64 instruction that writes the upper 32 bits only, 20 of them of the fraction."""


@cache
def relative_errors(*families: str) -> dict[str, float]:
    """The largest relative error of each documented instruction of some families, by its name.

    `div` and `rcp` stand behind quotients, `sqrt` behind roots, `rsqrt` behind both. The other
    approximate instructions (`ex2`, `lg2`, `sin`, `cos`, `tanh`) are in no formula here: a kernel
    that forms a power of beta with them is held to the bound of the power itself.
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
}
"""Operations of a formula that an instruction with `.ftz` carries out."""


@dataclass(frozen=True, kw_only=True)
class InstructionError:
    """What to add to the bound of each operation.

    Attributes:
        quotient: relative error of a division, above its rounding.
        root: relative error of a square root, above its rounding.
        flushed: operations (`add`, `mul`, `div`, `sqrt`) that treat subnormals as zero.
        approximate: names of the approximate instructions met.
    """

    quotient: float = 0.0
    root: float = 0.0
    flushed: frozenset[str] = field(default_factory=frozenset)
    approximate: tuple[str, ...] = ()


IEEE = InstructionError()
CPU = InstructionError(root=ULP)
UNKNOWN = InstructionError(quotient=2 * ULP, root=2 * ULP, flushed=frozenset({"sqrt"}))


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
