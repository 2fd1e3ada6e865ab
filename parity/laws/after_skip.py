"""The call after a skipped step is like any other.

An overflow, then the same step without one, in the same memory: the second call agrees with the
reference. What the host remembers of a tensor must not count the skipped step.

Real bugs: weights that hold gradients after an overflow (hpcaitech/ColossalAI#604); a caller that
takes a skipped step for a step (huggingface/accelerate#4242); a first step that accumulates unlike
all others (deepspeedai/DeepSpeed#6550); step counters advanced by calls that did nothing
(NVIDIA/TransformerEngine#3318).
"""

from __future__ import annotations

from collections.abc import Sequence

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Values
from twinstep.parity.laws.skipped_step import skipped


def plan(case: Case, arithmetic: str) -> Plan:
    """The case with an overflow, then the case itself in the same memory."""
    overflows: Sequence[Case] = list(skipped(case))
    first = [Call(case=other, fresh=True) for other in overflows]
    there = Call(case=case, reuse=0 if first else None)
    return Plan(calls=(*first, there), checks=(Values(call=len(first)),))


AFTER_SKIP = Law(
    name="after_skip",
    says="the call after a skipped step is like any other",
    share=0.25,
    plan=plan,
)
