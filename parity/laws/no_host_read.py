"""The launcher reads no device value on the host.

For kernels that claim `capturable`. A launcher that calls `.item()` on a control waits for all work
queued before it; the overflow flag is the usual one. What PyTorch reads of tensors while the
launcher runs is noted with file and line: on the CPU the same operators run as on a GPU.

Real bugs: scalars read at capture time and frozen into the graph, so that every replay repeats the
first step's bias correction (pytorch/pytorch#76368, pytorch/pytorch#106802); an optimizer that
waits for found_inf in every step.
"""

from __future__ import annotations

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import NoHostRead, Plan


def plan(case: Case, arithmetic: str) -> Plan:
    """One watched call."""
    return Plan(calls=(Call(case=case, watched=True),), checks=(NoHostRead(),))


NO_HOST_READ = Law(
    name="no_host_read",
    says="the launcher reads no device value on the host",
    share=0.2,
    plan=plan,
    claim="capturable",
)
