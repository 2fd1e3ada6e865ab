"""Non-finite and huge values end where the reference says: +inf, -inf, NaNs, the largest finite.

Each kind is planted at the first element of the first tensor, NaN also at the last of the last and
-inf in the middle, so that every dtype group and every tail sees one, alone; an infinity at either
end of tensors off their alignment, and of a long list; an infinity before and behind a NaN; then a
whole tensor of them, and a whole tensor of the largest finite number under the smallest and largest
multiplier.

Real bugs: an overflow test of the sum instead of the elements (deepspeedai/DeepSpeed#8325); inf
times zero in a masked norm (deepspeedai/DeepSpeed#5242); a later dtype group that clears the flag
(flagos-ai/Torch-FL#235); a block maximum that drops NaN; fast-math that assumes there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.coverage import overflows
from twinstep.parity.cases.formats import FORMATS, non_finite_bits
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.planting import plant, replaced, with_bits
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Values

# More tensors than tables of 110, 128 or 256 hold.
MANY = (1, 3, 2) * 90


def matrix(case: Case) -> Iterator[Case]:
    """The case for every kind of value and every position; overflows meet all control values.

    The flag is down, or it could not be seen to rise.
    """
    read = [row for row in case.operation.controls if not row.output]
    if any(row.name == "found_inf" for row in read):
        case = case.with_controls(found_inf=0.0)
    others = [row for row in read if row.name != "found_inf"]
    turn = 0
    for other in (*placed(case), *off_alignment(case), *in_long_lists(case)):
        if overflows(other):
            drawn = {row.name: row.values[turn % len(row.values)] for row in others}
            other, turn = other.with_controls(**drawn), turn + 1
        yield other


def placed(case: Case) -> Iterator[Case]:
    """The case once for every kind of value and every position."""
    for name in case.operation.watched:
        tensors = case.lists[name]
        full = [index for index, tensor in enumerate(tensors) if tensor.numel()]
        if not full:
            continue
        positions = {
            (full[0], 0),
            (full[-1], tensors[full[-1]].numel() - 1),
            (full[len(full) // 2], tensors[full[len(full) // 2]].numel() // 2),
        }
        for index, place in sorted(positions):
            every = list(non_finite_bits(FORMATS[tensors[index].dtype]))
            some = ("NaN",) if index == full[-1] else ("-inf",)
            for kind in every if (index, place) == (full[0], 0) else some:
                yield plant(case, name, index, place, kind)
        ends = min(positions), max(positions)
        for one, other in (ends, ends[::-1]):
            yield plant(plant(case, name, *one, "+inf"), name, *other, "NaN")
        largest = max(full, key=lambda index: tensors[index].numel())
        yield from crowds(case, name, largest)


def off_alignment(case: Case) -> Iterator[Case]:
    """An infinity at either end, where every tensor begins an element off its alignment.

    Only where it is looked for: elsewhere `alignment` sees what is left out.
    """
    for name in case.operation.watched if looks_for_it(case) else ():
        full = [index for index, tensor in enumerate(case.lists[name]) if tensor.numel()]
        skews = {own: [1] * len(tensors) for own, tensors in case.lists.items()}
        ends = [(full[0], 0), (full[-1], case.lists[name][full[-1]].numel() - 1)] if full else []
        for index, place in ends:
            yield replace(plant(case, name, index, place, "+inf"), skews=skews)


def in_long_lists(case: Case) -> Iterator[Case]:
    """An infinity in the first tensor of a long list alone, and in the last one.

    A launch takes some tensors of it, and the next launch may forget what the last one has found.
    """
    if case.recipe.layout == "list" and looks_for_it(case):
        recipe = replace(case.recipe, sizes=MANY, dims=1, absent=False)
        many = generate(case.operation, case.combination, recipe)
        for name in many.operation.watched:
            for index in (0, len(many.lists[name]) - 1) if many.lists[name] else ():
                yield plant(many, name, index, 0, "+inf")


def looks_for_it(case: Case) -> bool:
    """True if the operation says whether there was an overflow."""
    return bool({"found_inf", "norm"}.intersection(case.operation.writes))


def crowds(case: Case, name: str, index: int) -> Iterable[Case]:
    """Every element of one tensor non-finite, or huge with one sign, under two multipliers."""
    tensor = case.lists[name][index]
    patterns = non_finite_bits(FORMATS[tensor.dtype])
    everywhere = range(tensor.numel())
    for kind in ("NaN", "+inf", "huge"):
        yield replaced(case, name, index, with_bits(tensor, everywhere, patterns[kind]))
    huge = replaced(case, name, index, with_bits(tensor, everywhere, patterns["huge"]))
    for control in case.operation.controls:
        if control.dtype == torch.float32 and len(control.values) > 2:
            for value in (min(control.values), max(control.values)):
                yield huge.with_controls(**{control.name: value})


def plan(case: Case, arithmetic: str) -> Plan:
    """One call, compared with the reference; off alignment it may be refused."""
    skewed = any(any(skews) for skews in case.skews.values())
    return Plan(calls=(Call(case=case, may_refuse=skewed),), checks=(Values(),))


NON_FINITE = Law(
    name="non_finite",
    says="inf, NaN and huge values, first, middle and last",
    share=0.1,
    each_layout=True,
    draw=Draw(regimes=("ordinary",), sizes="small"),
    vary=matrix,
    plan=plan,
)
