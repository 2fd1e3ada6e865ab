"""No result depends on memory that nothing has written.

The same call is made four times. What the kernel allocates without values (`torch.empty` and its
kin, `resize_`), its outputs, and on replay shared memory hold zeros, then NaNs and set bits, ones
and large numbers. The results must be equal. The first read of such memory that replay sees, or
else the line that allocated it, is named.

Real bugs: scratch of a second reduction phase that is not zeroed (deepspeedai/DeepSpeed, its
source); a kernel that returns what it found passes where the reference's memory is recycled
(ScalingIntelligence/KernelBench#82, meta-pytorch/tritonbench#409).
"""

from __future__ import annotations

from collections.abc import Iterable

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.garbage import GARBAGE, spoiled
from twinstep.parity.cases.regimes import FINITE
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same
from twinstep.parity.laws.race_free import crowded
from twinstep.parity.operations.operation import Role


def grown(case: Case) -> Iterable[Case]:
    """The recipe of the case with a long tensor, which several blocks share; taken."""
    return list(crowded(case))[:1]


def holding(case: Case, garbage: str) -> Case:
    """The case with garbage in everything that is only written."""
    lists = {name: list(tensors) for name, tensors in case.lists.items()}
    for name in case.operation.lists_of(Role.OUTPUT):
        lists[name] = [spoiled(tensor, garbage) for tensor in lists[name]]
    outputs = [control.name for control in case.operation.controls if control.output]
    changed = {name: spoiled(case.controls[name], garbage).item() for name in outputs}
    return case.with_lists(lists).with_controls(**changed)


def plan(case: Case, arithmetic: str) -> Plan:
    """A call with each kind of garbage, all compared with that on zeros."""
    calls = tuple(Call(case=holding(case, kind), garbage=kind) for kind in GARBAGE)
    says = "depends on memory that nothing has written"
    checks = tuple(Same(says=says, second=number) for number in range(1, len(calls)))
    return Plan(calls=calls, checks=checks)


UNINITIALISED = Law(
    name="uninitialised",
    says="no result depends on memory that nothing has written",
    share=0.05,
    # A skipped step writes no outputs.
    draw=Draw(regimes=("mixture", *FINITE)),
    vary=grown,
    plan=plan,
)
