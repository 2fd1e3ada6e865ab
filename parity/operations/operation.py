"""An operation: a contract between a reference and any number of kernels.

Three words, used everywhere in `parity`:

- An *operation* fixes a signature, a reference function, what is written, which dtypes meet, and
  which laws hold.
- A *kernel* is somebody's implementation of an operation.
- A *case* is one set of arguments.

Arguments come in three kinds. *Lists* are positional lists of tensors (a flat buffer is a list of
one). *Controls* are keyword-only 0-dim tensors on the data's device, so that a kernel never needs
the host. *Options* are keyword-only plain Python values, fixed per call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

OptionValue = bool | int | str
Shape = tuple[int, ...]
Combination = Mapping[str, tuple[torch.dtype, ...]]
LAYOUTS = ("flat", "list")


class Role(Enum):
    """Meaning of a list; the generator and the laws go by it, never by the name."""

    PARAM = "weights, read and written"
    GRAD = "gradients"
    MOMENT = "signed state"
    SQUARE = "state that is never negative"
    OUTPUT = "written, never read"
    STEPS = "completed steps, int64 scalars"
    VALUE = "plain values"
    CODE = "quantised state: integers, every one allowed"
    SCALE = "scales of blocks, never negative"


@dataclass(frozen=True, kw_only=True)
class ListArgument:
    """A positional list of tensors.

    Attributes:
        name: of the argument.
        role: what its tensors mean.
        optional: an empty list means "absent".
        single: always a list of one tensor (a flat buffer), whatever the layout.
        shape: from the shape of a tensor of the leading list, the first one, that of its companion
            here; None where it has none. Without it they are equal.
    """

    name: str
    role: Role
    optional: bool = False
    single: bool = False
    shape: Callable[[Shape], Shape | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Range:
    """Positive numbers that a control is drawn from continuously, each magnitude alike.

    Attributes:
        low: the smallest, above 0.
        high: the largest.
        below_one: 1 - x is drawn from the range, not x.
        single: x is an fp32 number, whatever the dtype of the control.
    """

    low: float
    high: float
    below_one: bool = False
    single: bool = False

    def at(self, share: float) -> float:
        """The number so far along the range, from 0 to 1, by its logarithm."""
        found = math.exp(math.log(self.low) * (1.0 - share) + math.log(self.high) * share)
        found = 1.0 - found if self.below_one else found
        return float(np.float32(found)) if self.single else found


@dataclass(frozen=True, kw_only=True)
class Control:
    """A keyword-only 0-dim tensor.

    Attributes:
        name: of the argument.
        dtype: float64, float32 or int64.
        values: what the generator draws from: odd ones, customary ones, limits.
        range: what it draws from besides; None for a decision or an output.
        output: written and never read, so that its incoming value must not matter.
    """

    name: str
    dtype: torch.dtype
    values: tuple[float, ...]
    range: Range | None = None
    output: bool = False

    @property
    def decision(self) -> bool:
        """True if it is a flag: it has the value 0 or 1, whatever its dtype."""
        return self.range is None and not self.output

    @property
    def finite(self) -> bool:
        """True if it is never infinite and no NaN."""
        return all(map(math.isfinite, self.values))

    @property
    def signed(self) -> bool:
        """True if it may be negative; if not, neither is a zero of it."""
        return any(value < 0 for value in self.values)

    def within(self, value: float) -> bool:
        """True for a value that the contract allows.

        Flags are 0 or 1, most numbers are finite, many not negative, and scales are not 0.
        """
        if self.decision:
            return value in (0.0, 1.0)
        if value == 0 and self.dtype.is_floating_point and self.range and 0.0 not in self.values:
            return False
        if self.finite and not self.signed and math.copysign(1.0, value) < 0:
            return False
        return math.isfinite(value) or not self.finite

    def bounded(self, value: float) -> bool:
        """True for a value that bounds are derived for: a listed one, or one of its range."""
        drawn = self.range
        if drawn is None or value in self.values:
            return self.within(value)
        return drawn.low <= (1.0 - value if drawn.below_one else value) <= drawn.high


@dataclass(frozen=True, kw_only=True)
class Option:
    """A keyword-only plain Python value and every choice there is."""

    name: str
    choices: tuple[OptionValue, ...]


class Bound(Enum):
    """Allowed distance from the reference of a kernel with arithmetic="bounded"."""

    PROPAGATED = "roundings of the reference's own formula, propagated"
    SUM = "a sum of n squares in fp32, in any order"
    EXACT = "none: the result is one rounding, a decision or a copy"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A contract. Kernels write the arguments in `writes` in place and return None.

    Attributes:
        name: unique, used in `@register`.
        summary: one sentence for the documentation.
        equations: the definition, one line each, in the order of the arithmetic.
        lists: positional arguments, in order.
        controls: keyword-only 0-dim tensors.
        options: keyword-only plain values.
        writes: names of what is written; everything else must stay unchanged, bit for bit.
        reference: takes the same arguments, mutates nothing, returns one entry per name in
            `writes` (a list for a list, a 0-dim tensor for a control).
        combinations: dtype combination -> list -> dtypes; tensor i has dtype i modulo their
            number; an optional list that is not named is empty.
        laws: names of the laws that hold, in the order of the table's columns.
        layouts: `flat` (one tensor per list) and `list`; operations without lists have neither.
        bound: what `arithmetic="bounded"` allows.
        whole_tensors: a result depends on all elements of its tensor; under the law large_index
            zeros among them should change nothing, and stay zeros.
        dims: numbers of dimensions that tensors have; empty ones have one.
        together: values of controls and options that some cases give all at once: customary
            settings, and those that meet in one branch.
        accepts: deviations of a kernel, by name, whose error its bounds hold besides
            (`parity/expected/deviations.py`); empty but for a kernel that accepts some.
    """

    name: str
    summary: str
    equations: tuple[str, ...]
    lists: tuple[ListArgument, ...] = ()
    controls: tuple[Control, ...] = ()
    options: tuple[Option, ...] = ()
    writes: tuple[str, ...]
    reference: Callable[..., tuple[object, ...]]
    combinations: Mapping[str, Combination]
    laws: tuple[str, ...]
    layouts: tuple[str, ...] = LAYOUTS
    bound: Bound = Bound.PROPAGATED
    whole_tensors: bool = False
    dims: tuple[int, ...] = (1, 3, 2, 0, 4)
    together: tuple[Mapping[str, OptionValue | float], ...] = ()
    accepts: tuple[str, ...] = ()

    def list_named(self, name: str) -> ListArgument:
        """The list argument of that name."""
        return next(argument for argument in self.lists if argument.name == name)

    def lists_of(self, *roles: Role) -> tuple[str, ...]:
        """Names of the lists with one of these roles."""
        return tuple(argument.name for argument in self.lists if argument.role in roles)

    @property
    def watched(self) -> tuple[str, ...]:
        """Lists that an overflow shows in: the gradients, or weights and values without these."""
        return self.lists_of(Role.GRAD) or self.lists_of(Role.PARAM, Role.VALUE)

    @property
    def shaped(self) -> tuple[ListArgument, ...]:
        """The lists whose shapes follow from those of the leading list."""
        return tuple(argument for argument in self.lists if argument.shape is not None)

    def companions(self, name: str, lead: Sequence[Shape]) -> list[tuple[int, Shape]]:
        """Position in the leading list, and shape, of every tensor of a list."""
        shape = self.list_named(name).shape
        found = [(at, own if shape is None else shape(own)) for at, own in enumerate(lead)]
        return [(at, tuple(own)) for at, own in found if own is not None]

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of all keyword-only arguments: controls, then options."""
        controls = tuple(control.name for control in self.controls)
        return controls + tuple(option.name for option in self.options)

    @property
    def skippable(self) -> bool:
        """True if an overflow turns the call into a skipped step."""
        return "skipped_step" in self.laws

    @property
    def elementwise(self) -> bool:
        """True if an element does not depend on others: a few of a huge tensor decide alone."""
        return "large_index" in self.laws and not self.whole_tensors

    @property
    def takes_norms(self) -> bool:
        """True if elements of a tensor meet in a norm that is no output, as in LAMB."""
        return "splitting" not in self.laws and bool(self.lists_of(Role.PARAM))
