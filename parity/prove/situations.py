"""Situations in which a kernel is proved: dtypes, layout, sizes and options, one case for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.operations.operation import Operation, OptionValue
from twinstep.parity.registry.kernels import Kernel

LARGE: Mapping[str, tuple[int, ...]] = {"flat": (4300,), "list": (4200, 37)}
"""A whole chunk of our kernels and a tail."""
SMALL: Mapping[str, tuple[int, ...]] = {"flat": (150,), "list": (150, 37)}
"""Sizes of tensors that start anywhere, and of choices of options that dtypes share."""
FEW = 2
"""Most choices of options that each dtype combination has at every size."""


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
        """The case of the first call; values matter only to what keeps them."""
        operation = self.kernel.operation
        recipe = Recipe(
            layout=self.layout or "flat",
            sizes=self.sizes or (1,),
            regime="ordinary",
            # Seeds that 3 divides have tensors of zeros, whose sums no element shows in.
            seed=1,
            controls={control.name: control.values[0] for control in operation.controls},
            options=self.options,
            aligned=self.aligned,
            # Unaligned tensors have made no step yet.
            step=int(not self.aligned),
        )
        return generate(operation, self.dtype, recipe)


def situations(kernel: Kernel, dtypes: Sequence[str] = ()) -> Iterator[Situation]:
    """The situations of a kernel; unaligned tensors with the first choice of each option.

    Where options have more than a few choices, each dtype combination has the first, and its share
    of the others in small tensors: together they have all.
    """
    first, *rest = choices(kernel.operation)
    for turn, dtype in enumerate(kernel.dtypes):
        if dtypes and dtype not in dtypes:
            continue
        shared = len(rest) >= FEW
        own = rest[turn :: len(kernel.dtypes)] if shared else rest
        for layout in kernel.layouts or ("",):
            large, small = LARGE.get(layout, ()), SMALL.get(layout, ())
            yield Situation(kernel, dtype, layout, large, True, first)
            for one in own:
                yield Situation(kernel, dtype, layout, small if shared else large, True, one)
            if layout:
                yield Situation(kernel, dtype, layout, small, False, first)


def choices(operation: Operation) -> list[dict[str, OptionValue]]:
    """Every choice of the options of an operation."""
    names = [option.name for option in operation.options]
    every = itertools.product(*(option.choices for option in operation.options))
    return [dict(zip(names, values, strict=True)) for values in every]
