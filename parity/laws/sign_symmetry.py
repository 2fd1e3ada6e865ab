"""Weights, gradients and signed state with the other sign give results with the other sign.

Every formula here is odd in them, and rounding to nearest is odd too. Second moments and norms stay
as they are; a zero has no sign in this comparison, since x - x is +0 for either sign of x. Half of
the cases have one sign throughout, which no other law draws. Exact kernels leave mirrored bits;
bounded kernels agree with the reference each time.

Real bugs: the sign of zero taken for -1, so that idle weights drift (Lion in
deepspeedai/DeepSpeed, its source); random bits of stochastic rounding added without looking at the
sign (pytorch/ao#1124); a maximum where the largest magnitude was meant, which an all-negative block
hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.formats import widened
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Values
from twinstep.parity.operations.operation import Role

SIGNED = (Role.PARAM, Role.GRAD, Role.MOMENT, Role.VALUE, Role.OUTPUT)


def one_sided(case: Case) -> Iterable[Case]:
    """The case unchanged, and with every signed element positive."""
    return (case, _changed(case, Tensor.abs))


def _changed(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    names = case.operation.lists_of(*SIGNED)
    lists = {
        name: [change(widened(t)).to(t.dtype) for t in tensors] if name in names else tensors
        for name, tensors in case.lists.items()
    }
    return case.with_lists(lists)


def plan(case: Case, arithmetic: str) -> Plan:
    """The case and its mirror image."""
    names = case.operation.lists_of(*SIGNED)
    calls = (Call(case=case), Call(case=_changed(case, Tensor.neg)))
    if arithmetic != "exact":
        return Plan(calls=calls, checks=(Values(call=0), Values(call=1)))
    return Plan(calls=calls, checks=(Same(says="is not the mirror image", negated=names),))


SIGN_SYMMETRY = Law(
    name="sign_symmetry",
    says="inputs of the other sign give results of the other sign",
    share=0.2,
    vary=one_sided,
    plan=plan,
)
