"""Situations in which a kernel is proved: dtypes, layout, sizes, options and counters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.covering import STEPS, covering_recipes
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import Operation, OptionValue
from twinstep.parity.registry.kernels import Kernel

LARGE: Mapping[str, tuple[int, ...]] = {"flat": (4300,), "list": (4200, 37)}
"""A whole chunk of our kernels and a tail."""
SMALL: Mapping[str, tuple[int, ...]] = {"flat": (150,), "list": (150, 37)}
"""Sizes of tensors that start anywhere, and of choices of options that dtypes share."""
FEW = 2
"""Most choices of options that each dtype combination has at every size."""
SETTINGS = 60
"""Settings of the counters of an operation, dealt out among the choices of its options."""
LATE = STEPS.index(2**53)
"""A step that needs all bits of a float64; the next tensor has completed few."""


@dataclass(frozen=True)
class Situation:
    """Subject of one proof.

    Attributes:
        kernel: that is proved.
        dtype: combination.
        layout: `flat` or `list`; empty where the operation has no lists.
        sizes: elements of each tensor.
        aligned: tensors start at multiples of 64 bytes.
        options: plain arguments.
    """

    kernel: Kernel
    dtype: str
    layout: str
    sizes: tuple[int, ...]
    aligned: bool
    options: Mapping[str, OptionValue]

    @property
    def place(self) -> str:
        """Layout, sizes and alignment in words; empty where there are no lists."""
        parts = [self.layout, "+".join(map(str, self.sizes))] if self.layout else []
        return " ".join([*parts, *([] if self.aligned else ["unaligned"])])

    @property
    def words(self) -> str:
        """The situation in words."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([*([self.place] if self.place else []), *options])

    def case(self) -> Case:
        """The first case."""
        return next(self.cases())

    def cases(self) -> Iterator[Case]:
        """The case of the first call for each setting; values matter only to what keeps them."""
        operation = self.kernel.operation
        first = {control.name: control.values[0] for control in operation.controls}
        late = LATE if self.layout == "list" else 0
        for setting in settings(operation, self.options):
            recipe = Recipe(
                layout=self.layout or "flat",
                sizes=self.sizes or (1,),
                regime="ordinary",
                # Seeds that 3 divides have tensors of zeros, whose sums no element shows in.
                seed=1,
                controls={**first, **setting},
                options=self.options,
                aligned=self.aligned,
                # Unaligned tensors have made no step yet.
                step=late if self.aligned else 1,
            )
            yield generate(operation, self.dtype, recipe)


def situations(
    kernel: Kernel, dtypes: Sequence[str] = (), among: Sequence[str] = ()
) -> Iterator[Situation]:
    """The situations of a kernel; unaligned tensors with the first choice of each option.

    Where options have more than a few choices, each dtype combination has the first, and its share
    of the others in small tensors: together they have all.

    Args:
        kernel: that is proved.
        dtypes: combinations; empty for all of the kernel's.
        among: combinations that share the choices; empty for the kernel's.
    """
    first, *rest = choices(kernel.operation)
    among = among or kernel.dtypes
    for dtype in kernel.dtypes:
        if dtypes and dtype not in dtypes:
            continue
        shared = len(rest) >= FEW
        own = rest[among.index(dtype) :: len(among)] if shared else rest
        for layout in kernel.layouts or ("",):
            large, small = LARGE.get(layout, ()), SMALL.get(layout, ())
            yield Situation(kernel, dtype, layout, large, True, first)
            for one in own:
                yield Situation(kernel, dtype, layout, small if shared else large, True, one)
            if layout:
                yield Situation(kernel, dtype, layout, small, False, first)


def settings(
    operation: Operation, options: Mapping[str, OptionValue]
) -> Sequence[Mapping[str, float]]:
    """Counters that a choice of options is proved with; one setting where there are lists.

    They are those of the judge's cases: listed values in pairs, triples where there are no lists,
    and drawn ones. The first choice has the first value of each.
    """
    whole = [c.name for c in operation.controls if not c.dtype.is_floating_point]
    if not whole:
        return [{}]
    every = choices(operation)
    count, layouts = max(SETTINGS, len(every)), LARGE if operation.lists else ()
    recipes = covering_recipes(
        operation, next(iter(operation.combinations)), tuple(layouts), count, None
    )
    own = recipes[every.index(dict(options)) :: len(every)]
    known = [{name: recipe.controls[name] for name in whole} for recipe in own]
    return known[:1] if operation.lists else known


def choices(operation: Operation) -> list[dict[str, OptionValue]]:
    """Every choice of the options of an operation."""
    names = [option.name for option in operation.options]
    every = itertools.product(*(option.choices for option in operation.options))
    return [dict(zip(names, values, strict=True)) for values in every]
