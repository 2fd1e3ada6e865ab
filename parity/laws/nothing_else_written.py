"""Nothing is written but what the operation writes, and what lies around the tensors is not read.

Guard bytes before, between and after the tensors, alignment gaps, gradients and every other
read-only input keep every bit; and other guard bytes must not change any result.

Real bugs: stores without the mask that was computed for them (Dao-AILab/flash-attention#2789,
bitsandbytes-foundation/bitsandbytes#2042); a fused step that scales the caller's gradients in place
(linkedin/Liger-Kernel#1305); a tail loop that leaves the update in the gradient (CPU Adagrad in
deepspeedai/DeepSpeed, its source); a zeroed buffer that backs other views
(NVIDIA/Megatron-LM@c2c36f77).
"""

from __future__ import annotations

from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Untouched


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
