"""The start of a tensor does not matter, as long as its elements are aligned.

The same values lie at multiples of 64 bytes; then every tensor a few elements further; then the
tensors of each list side by side, those of the second list in the opposite order; then those of one
list alone further, each list in turn. Each call gives the same results, or is refused with an error
that gives a reason, with every byte unchanged.

Real bugs: a shard that starts at an odd offset given to a collective or a vectorised kernel
(deepspeedai/DeepSpeed#1328, deepspeedai/DeepSpeed#1564); alignment tested for one tensor and
assumed for the others; weights found in one flat buffer, and gradients taken to lie alike.
"""

from __future__ import annotations

from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Values


def plan(case: Case, arithmetic: str) -> Plan:
    """The case, everything off alignment, lists without room, and each list off alignment alone."""
    every = _shifted(case, tuple(case.lists))
    alone = [_shifted(case, (name,)) for name in case.lists] if len(case.lists) > 1 else []
    moved = (every, replace(every, adjacent=True), *alone)
    calls = (Call(case=case), *(Call(case=one, may_refuse=True) for one in moved))
    if arithmetic != "exact":
        return Plan(calls=calls, checks=tuple(Values(call=number) for number in range(len(calls))))
    says = "depends on where the tensors start"
    numbers = range(1, len(calls))
    return Plan(calls=calls, checks=tuple(Same(says=says, second=number) for number in numbers))


def _shifted(case: Case, names: tuple[str, ...]) -> Case:
    """These lists a few elements further: 1 to 8, in turn."""
    first = case.recipe.seed % 8
    skews = {
        name: [1 + (first + at) % 8 if name in names else 0 for at in range(len(tensors))]
        for name, tensors in case.lists.items()
    }
    return replace(case, skews=skews)


ALIGNMENT = Law(
    name="alignment",
    says="tensors may start anywhere, or are refused with a clear error",
    share=0.25,
    draw=Draw(),
    plan=plan,
)
