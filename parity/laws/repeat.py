"""The same call gives the same bits: after other calls, and in the same memory; no call leaks.

Real bugs: autotuning on live state (lucidrains/lion-pytorch#36, triton-lang/triton#7181); a result
buffer cached by the length of a list (the norm of deepspeedai/DeepSpeed, its source); atomics whose
order decides the last bits (triton-lang/triton#6227); a scratch buffer that is never cleared.
"""

from __future__ import annotations

from dataclasses import replace

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.plan import Call, Plan, Same, Values


def smaller(case: Case) -> Case:
    """Another case of the same kind: half of the tensors, or half of the only one."""
    if case.length > 1:
        return case.taken(range((case.length + 1) // 2))
    cut = {
        name: [t if t.dim() == 0 else t.reshape(-1)[: (t.numel() + 1) // 2] for t in tensors]
        for name, tensors in case.alike.items()
    }
    return case.with_lists({**case.lists, **cut})


def other_values(case: Case) -> Case:
    """Another case of the same sizes: other values, and another value of every control."""
    controls = {
        control.name: control.values[(place + case.recipe.seed) % len(control.values)]
        for place, control in enumerate(case.operation.controls)
    }
    recipe = replace(case.recipe, controls=controls, seed=case.recipe.seed ^ 0xFFFF)
    if recipe.regime == "planted":
        recipe = replace(recipe, regime="ordinary")
    return generate(case.operation, case.combination, recipe)


def plan(case: Case, arithmetic: str) -> Plan:
    """Other values of the same sizes, the case, a smaller one, the case twice more.

    The first call is compared with the reference too: a kernel that is tuned on live tensors is
    wrong there and nowhere else.
    """
    single = any(argument.single for argument in case.operation.lists)
    other = case if single else smaller(case)
    calls = (
        Call(case=other_values(case)),
        Call(case=case),
        Call(case=other),
        Call(case=case, fresh=True),
        Call(case=case, reuse=1),
    )
    again = Same(says="differs when the call is repeated after another one", first=1, second=3)
    there = Same(says="differs when the call is repeated in the same memory", first=1, second=4)
    return Plan(calls=calls, checks=(Values(call=0), Values(call=1), again, there))


REPEAT = Law(
    name="repeat",
    says="the same call gives the same bits",
    share=0.25,
    plan=plan,
)
