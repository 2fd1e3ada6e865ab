"""The same call gives the same bits: again, after a call of another size, and in the same memory.

Real bugs: races between blocks; atomics whose order decides the last bits; a pointer table or a
scratch buffer cached by address or by length and not renewed; a global accumulator that is never
cleared; autotuning on live state.
"""

from __future__ import annotations

from parity.case import Case
from parity.laws.base import Draw, Law
from parity.plan import Call, Plan, Same


def smaller(case: Case) -> Case:
    """Another case of the same kind: half of the tensors, or half of the only one."""
    if case.length > 1:
        half = (case.length + 1) // 2
        lists = {name: list(tensors)[:half] for name, tensors in case.lists.items()}
        return case.with_lists(lists)
    cut = {
        name: [t if t.dim() == 0 else t.reshape(-1)[: (t.numel() + 1) // 2] for t in tensors]
        for name, tensors in case.lists.items()
    }
    return case.with_lists(cut)


def plan(case: Case, arithmetic: str) -> Plan:
    """The case, another one, the case again, and once more in the memory of the first call."""
    single = any(argument.single for argument in case.operation.lists)
    other = case if single else smaller(case)
    calls = (Call(case=case), Call(case=other), Call(case=case), Call(case=case, reuse=0))
    again = Same(says="differs when the call is repeated after another one", first=0, second=2)
    there = Same(says="differs when the call is repeated in the same memory", first=0, second=3)
    return Plan(calls=calls, checks=(again, there))


REPEAT = Law(
    name="repeat",
    says="the same call gives the same bits",
    share=0.35,
    draw=Draw(full=True),
    plan=plan,
)
