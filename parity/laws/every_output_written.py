"""Arguments that are written and never read are written completely, whatever was in them.

The same call is made twice, with two different poisons in those arguments; the results must be
equal.

Real bugs: low-precision copies left stale where the update is small; padding of a flat buffer that
keeps what the allocator returned; a norm accumulated on top of its old value; an empty list of
tensors that leaves the norm unwritten.
"""

from __future__ import annotations

import torch

from parity.case import Case
from parity.expand import with_bits
from parity.formats import FORMATS
from parity.laws.base import Draw, Law
from parity.operation import Operation, Role
from parity.plan import Call, Plan, Same
from parity.regimes import FINITE

POISONS = (0x5A5A5A5A, 0xA5C3A5C3)
CONTROL_POISONS = (-7.0, 1.25)


def poisoned(case: Case, which: int) -> Case:
    """The case with one of the two poisons in everything that is only written."""
    lists = {name: list(tensors) for name, tensors in case.lists.items()}
    for name in case.operation.lists_of(Role.OUTPUT):
        for index, tensor in enumerate(lists[name]):
            width = FORMATS[tensor.dtype].width
            pattern = POISONS[which] & ((1 << width) - 1)
            lists[name][index] = with_bits(tensor, range(tensor.numel()), pattern)
    outputs = [control for control in case.operation.controls if control.output]
    changed = {
        control.name: CONTROL_POISONS[which] if control.dtype != torch.int64 else which
        for control in outputs
    }
    return case.with_lists(lists).with_controls(**changed)


def plan(case: Case, arithmetic: str) -> Plan:
    """Two calls that differ in what the outputs held before."""
    lists = case.operation.lists_of(Role.OUTPUT)
    controls = tuple(control.name for control in case.operation.controls if control.output)
    says = "depends on what the output held before the call"
    return Plan(
        calls=(Call(case=poisoned(case, 0)), Call(case=poisoned(case, 1))),
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
