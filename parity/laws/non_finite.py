"""Non-finite and huge values end where the reference says: +inf, -inf, NaNs, the largest finite.

Each kind is planted at the first element of the first tensor, NaN also at the last of the last and
-inf in the middle, so that every dtype group and every tail sees one, alone; an infinity at either
end of tensors off their alignment; an infinity before and behind a NaN; then a whole tensor of
them, and a whole tensor of the largest finite number under the smallest and largest multiplier.

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
from twinstep.parity.cases.planting import plant, replaced, with_bits
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Values


def matrix(case: Case) -> Iterator[Case]:
    """The case for every kind of value and every position; overflows meet all control values.

    The flag is down, or it could not be seen to rise.
    """
    read = [row for row in case.operation.controls if not row.output]
    if any(row.name == "found_inf" for row in read):
        case = case.with_controls(found_inf=0.0)
    others = [row for row in read if row.name != "found_inf"]
    turn = 0
    for other in (*placed(case), *off_alignment(case)):
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
    looks = {"found_inf", "norm"}.intersection(case.operation.writes)
    for name in case.operation.watched if looks else ():
        full = [index for index, tensor in enumerate(case.lists[name]) if tensor.numel()]
        skews = {own: [1] * len(tensors) for own, tensors in case.lists.items()}
        ends = [(full[0], 0), (full[-1], case.lists[name][full[-1]].numel() - 1)] if full else []
        for index, place in ends:
            yield replace(plant(case, name, index, place, "+inf"), skews=skews)


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
