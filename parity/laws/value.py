"""Every written element agrees with the reference.

Kernels that claim `exact` agree in every bit: zero ULP, the sign of zero included, NaN with NaN
whatever its payload. Kernels that claim `bounded` stay within the bound derived from the
reference's formula (`parity/bounds.py`).

Real bugs: eps inside the square root; beta1 and beta2 swapped; weight decay coupled where it should
be decoupled; 1 - beta formed in fp32; moments kept in fp16; bias correction of the wrong step.
"""

from __future__ import annotations

from parity.case import Case
from parity.laws.base import Law
from parity.plan import Call, Plan, Values


def plan(case: Case, arithmetic: str) -> Plan:
    """One call, compared with the reference."""
    return Plan(calls=(Call(case=case),), checks=(Values(),))


VALUE = Law(name="value", says="agrees with the reference", plan=plan)
