"""Every written element agrees with the reference.

Kernels that claim `exact` agree in every bit: zero ULP, the sign of zero included, NaN with NaN
whatever its payload. Kernels that claim `bounded` stay within the bound derived from the
reference's formula (`parity/expected/bounds.py`). One case has a tensor of 2^18 to 2^21 elements.

Real bugs: eps multiplied by the bias correction (pytorch/pytorch#22628, NVIDIA/apex@18062b69);
beta2 read from the array of beta1 (NVIDIA/apex#1007); weight decay coupled where it should not be
(bitsandbytes-foundation/bitsandbytes#1993); arithmetic in the storage dtype (pytorch/ao#1068);
moments cast through the dtype of the weights (NVIDIA/TransformerEngine#1888); gradients unscaled
twice (pytorch/pytorch#94060); the clip coefficient's minimum taken for a maximum
(deepspeedai/DeepSpeed#5150).
"""

from __future__ import annotations

from twinstep.parity.cases.case import Case
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Values


def plan(case: Case, arithmetic: str) -> Plan:
    """One call, compared with the reference."""
    return Plan(calls=(Call(case=case),), checks=(Values(),))


VALUE = Law(name="value", says="agrees with the reference", thorough=True, plan=plan)
