"""Arguments that are written and never read are written completely, whatever was in them.

The same call is made twice: with stale but likely values in those arguments, and with poison. The
results must be equal.

Real bugs: a kernel that returns what it found passes where the reference's memory is recycled
(ScalingIntelligence/KernelBench#82, meta-pytorch/tritonbench#409); scratch of a second reduction
phase that is not zeroed (deepspeedai/DeepSpeed, its source); a grid of no blocks that never writes
small tensors (bytedance/lightseq#98); padding of a flat buffer left as it was.
"""

from __future__ import annotations

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.planting import with_bits
from twinstep.parity.cases.regimes import FINITE
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same
from twinstep.parity.operations.operation import Operation, Role

POISON = 0xA5C3A5C3


def poisoned(case: Case) -> Case:
    """The case with something else in everything that is only written."""
    lists = {name: list(tensors) for name, tensors in case.lists.items()}
    for name in case.operation.lists_of(Role.OUTPUT):
        for index, tensor in enumerate(lists[name]):
            pattern = POISON & ((1 << 8 * tensor.itemsize) - 1)
            lists[name][index] = with_bits(tensor, range(tensor.numel()), pattern)
    outputs = [control for control in case.operation.controls if control.output]
    changed = {row.name: 3.0 - float(case.controls[row.name].item()) for row in outputs}
    return case.with_lists(lists).with_controls(**changed)


def plan(case: Case, arithmetic: str) -> Plan:
    """Two calls that differ in what the outputs held before: stale weights, and poison."""
    lists = case.operation.lists_of(Role.OUTPUT)
    controls = tuple(control.name for control in case.operation.controls if control.output)
    says = "depends on what the output held before the call"
    return Plan(
        calls=(Call(case=case), Call(case=poisoned(case))),
        checks=(Same(says=says, names=tuple(dict.fromkeys((*lists, *controls)))),),
    )


def idle(operation: Operation, combination: str) -> str:
    """A combination without copies has nothing that is only written."""
    lists = set(operation.lists_of(Role.OUTPUT)) & set(operation.combinations[combination])
    if lists or any(control.output for control in operation.controls):
        return ""
    return f"{combination} has no argument that is only written"


EVERY_OUTPUT_WRITTEN = Law(
    name="every_output_written",
    says="outputs are written completely, whatever they held",
    share=0.5,
    # A gradient that is not finite would skip a whole step, and a skipped step writes nothing.
    draw=Draw(regimes=("mixture", *FINITE)),
    plan=plan,
    idle=idle,
)
