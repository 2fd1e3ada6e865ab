"""A step with overflow changes nothing, bit for bit, step counts included.

Where found_inf is an argument it is set; `mixed_step` finds the overflow itself, in a gradient that
is made non-finite.

Real bugs: fused Adam that updates on inf when no scale is given (pytorch/pytorch#95847,
pytorch/pytorch#95781); weights that hold gradients after an overflow (hpcaitech/ColossalAI#604);
bf16 gradients never checked, so that one overflow ruins the moments (deepspeedai/DeepSpeed#8035);
step counters that advance on skipped steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.planting import plant
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Unchanged, Values

KINDS = ("+inf", "NaN", "-inf", "signalling NaN")


def finds_overflow_itself(case: Case) -> bool:
    """True if found_inf is an output: the kernel looks at the gradients."""
    return any(c.name == "found_inf" and c.output for c in case.operation.controls)


def skipped(case: Case) -> Iterable[Case]:
    """The case with an overflow."""
    if not finds_overflow_itself(case):
        return [case.with_controls(found_inf=1.0)]
    if not case.operation.watched:
        return []
    name = case.operation.watched[0]
    full = [index for index, grad in enumerate(case.lists[name]) if grad.numel()]
    if not full:
        return []
    index = full[case.recipe.seed % len(full)]
    place = case.recipe.seed % case.lists[name][index].numel()
    kind = KINDS[case.recipe.seed // 7 % len(KINDS)]
    return [plant(case, name, index, place, kind)]


def plan(case: Case, arithmetic: str) -> Plan:
    """One call; the tensors keep every bit, and what is written besides is right."""
    names = tuple(argument.name for argument in case.operation.lists)
    besides = set(case.operation.writes) - set(names)
    unchanged = Unchanged(names=names)
    return Plan(calls=(Call(case=case),), checks=(unchanged, Values()) if besides else (unchanged,))


SKIPPED_STEP = Law(
    name="skipped_step",
    says="an overflow changes nothing, bit for bit",
    vary=skipped,
    plan=plan,
)
