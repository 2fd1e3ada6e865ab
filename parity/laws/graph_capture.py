"""A call captured as a CUDA graph, replayed on other contents, does what an eager call does.

For kernels that claim `capturable`, on a GPU. The graph is captured with one case and replayed with
it, then with other values of every tensor and control in the same memory: nothing of the first case
may be frozen into it. Options are part of the graph.

Real bugs: step count and learning rate frozen at capture (pytorch/pytorch#76368,
pytorch/pytorch#106802, tracel-ai/burn#5779); graphs that disagree with eager calls once a scalar
changes.
"""

from __future__ import annotations

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same
from twinstep.parity.laws.repeat import other_values


def plan(case: Case, arithmetic: str) -> Plan:
    """Eager and captured calls on two contents of one memory."""
    other = other_values(case)
    calls = (
        Call(case=case),
        Call(case=case, captured=True),
        Call(case=other, fresh=True),
        Call(case=other, reuse=1, captured=True),
    )
    says = "differs between an eager call and a replayed graph"
    checks = (Same(says=says), Same(says=says, first=2, second=3))
    return Plan(calls=calls, checks=checks)


GRAPH_CAPTURE = Law(
    name="graph_capture",
    says="a replayed CUDA graph does what an eager call does",
    share=0.2,
    plan=plan,
    claim="capturable",
    engines=("cuda",),
)
