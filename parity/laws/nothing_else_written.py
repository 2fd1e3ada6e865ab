"""Nothing is written but what the operation writes, and what lies around the tensors is not read.

Guard bytes before, between and behind the tensors, alignment gaps, gradients and every other
read-only input keep every bit; and other guard bytes must not change any result.

Real bugs: a tail that is not masked and writes past the end; fused steps that scale the caller's
gradients in place; a copy kernel that overwrites padding another rank owns; writing into a 0-dim
hyper-parameter; a norm that runs over the padding behind the last gradient.
"""

from __future__ import annotations

from dataclasses import replace

from parity.case import Case
from parity.laws.base import Law
from parity.plan import Call, Plan, Same, Untouched


def plan(case: Case, arithmetic: str) -> Plan:
    """Two calls in different surroundings; the bytes outside are compared with what they were."""
    elsewhere = replace(case, guard=case.guard ^ 0x5A)
    says = "depends on memory outside every tensor"
    return Plan(
        calls=(Call(case=case), Call(case=elsewhere)), checks=(Untouched(), Same(says=says))
    )


NOTHING_ELSE_WRITTEN = Law(
    name="nothing_else_written",
    says="guard bytes, gaps and read-only inputs keep every bit",
    share=0.4,
    plan=plan,
)
