"""Without any rounding the kernel's own formula is the specification.

The kernel runs on replay with a float64 value beside every number that derives from the tensors,
and what it would store without a single rounding is compared with the reference's formula in
float64 (`parity/expected/formula.py`). Scalars keep the kernel's own arithmetic, because their
rounding is
part of the definition.

Real bugs: eps inside the square root or scaled by a bias correction; weight decay applied to the
new weight; 1 - beta or a power of beta formed in fp32. Stored in bf16 all of them are smaller than
the rounding, and a bound for fp32 arithmetic must let the smallest pass.
"""

from __future__ import annotations

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Formula, Plan
from twinstep.parity.operations.operation import Operation

REGIMES = ("mixture", "ordinary", "cancelling", "tiny_root", "bits", "extreme")


def plan(case: Case, arithmetic: str) -> Plan:
    """One call, lifted."""
    return Plan(calls=(Call(case=case, lifted=True),), checks=(Formula(),))


def idle(operation: Operation, combination: str) -> str:
    """A norm inside a step is rounded by definition before it is used."""
    inside = "norm" in operation.writes and len(operation.writes) > 2
    return "the norm inside the step is rounded by definition" if inside else ""


FORMULA = Law(
    name="formula",
    says="without any rounding its formula is the specification",
    share=0.17,
    draw=Draw(regimes=REGIMES),
    plan=plan,
    idle=idle,
    engines=("replay",),
)
