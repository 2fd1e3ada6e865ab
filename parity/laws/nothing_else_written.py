"""Nothing is written but what the operation writes.

Guard bytes before, between and behind the tensors, alignment gaps, gradients and every other
read-only input keep every bit.

Real bugs: a tail that is not masked and writes past the end; fused steps that scale the caller's
gradients in place; a copy kernel that overwrites padding another rank owns; writing into a 0-dim
hyper-parameter.
"""

from __future__ import annotations

from parity.case import Case
from parity.laws.base import Draw, Law
from parity.plan import Call, Plan, Untouched


def plan(case: Case, arithmetic: str) -> Plan:
    """One call; the bytes outside what is written are compared with what they were."""
    return Plan(calls=(Call(case=case),), checks=(Untouched(),))


NOTHING_ELSE_WRITTEN = Law(
    name="nothing_else_written",
    says="guard bytes, gaps and read-only inputs keep every bit",
    share=0.5,
    draw=Draw(guards=(0x5A, 0x00), full=True),
    plan=plan,
)
