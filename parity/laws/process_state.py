"""The call leaves the process as it was, and keeps no gradient of its caller's alive.

Random numbers, default dtype, gradient mode, deterministic and TF32 flags, threads, flushing of
subnormals, warning filters, the caller's lists. A flag that a kernel leaves behind changes other
people's numbers, and those of the next kernel of the file.

Real bugs: a random number drawn from the global generator, so that dropout masks change with the
optimizer; `set_flush_denormal` left on; a list of gradients that keeps every step's alive, or the
last one's, which `zero_grad` then does not free; `gc.enable()` behind a loop that had it off.

Results that depend on the default dtype, autocast or a backend's switch are a note and no failure:
a scalar that goes through `torch.tensor` does, and nobody steps an optimizer under them.
"""

from __future__ import annotations

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Leaves, Plan, Same


def plan(case: Case, arithmetic: str) -> Plan:
    """The same call six times in one memory: a cache fills in the first ones and then is full.

    In the last one switches are turned: what is as it was is not what a new process has. Results
    that are others then, or a call that fails, are a note.
    """
    again = (Call(case=case, reuse=0, guarded=True, turned=at == 4) for at in range(5))
    alike = Same(says="depends on the default dtype, autocast or another switch", first=4, second=5)
    return Plan(calls=(Call(case=case, guarded=True), *again), checks=(Leaves(),), notes=(alike,))


PROCESS_STATE = Law(
    name="process_state",
    says="the process is left as it was, and keeps no gradient and no more",
    share=0.25,
    draw=Draw(regimes=("ordinary", "planted"), sizes="small"),
    plan=plan,
)
