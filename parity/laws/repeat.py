"""The same call gives the same bits: after other calls, in the same memory, and in part elsewhere.

Real bugs: autotuning on live state (lucidrains/lion-pytorch#36, triton-lang/triton#7181); a result
buffer cached by the length of a list (the norm of deepspeedai/DeepSpeed, its source); atomics whose
order decides the last bits (triton-lang/triton#6227); a scratch buffer that is never cleared; a
table of addresses that outlives what lay there; what was kept by a key that says too little.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import CONTROLS, INNER
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Values
from twinstep.parity.operations.operation import Role


def halved(case: Case) -> Case:
    """The case with the first half of every tensor."""
    cut = {
        name: [t if is_counter(t) else t.reshape(-1)[: (t.numel() + 1) // 2] for t in tensors]
        for name, tensors in case.alike.items()
    }
    return case.with_lists({**case.lists, **cut})


def smaller(case: Case) -> Case:
    """Another case of the same kind: half of the tensors, or half of the only one."""
    return case.taken(range((case.length + 1) // 2)) if case.length > 1 else halved(case)


def shorter(case: Case) -> Case | None:
    """The case with the first half of every tensor, at its addresses; None if not as many."""
    cut = halved(case)
    as_many = all(len(cut.lists[name]) == len(own) for name, own in case.lists.items())
    return replace(cut, lies_as=case) if as_many else None


def other_values(case: Case) -> Case:
    """Another case of the same sizes: other values, another value of every control and option."""
    controls = {
        control.name: control.values[(place + case.recipe.seed) % len(control.values)]
        for place, control in enumerate(case.operation.controls)
    }
    options = {
        option.name: option.choices[
            (option.choices.index(case.options[option.name]) + 1) % len(option.choices)
        ]
        for option in case.operation.options
    }
    # An odd seed has other shapes than an even one, and state of other sizes where they shape it.
    turned = 0xFFFE if case.operation.shaped else 0xFFFF
    recipe = replace(
        case.recipe, controls=controls, options=options, seed=case.recipe.seed ^ turned
    )
    if recipe.regime == "planted":
        recipe = replace(recipe, regime="ordinary")
    return generate(case.operation, case.combination, recipe)


def nearby(case: Case) -> Case:
    """The same case with other float64 controls that round to the same fp32 numbers."""
    drawn = {c.name for c in case.operation.controls if c.range is not None and not c.range.single}
    found: dict[str, float] = {}
    for name in sorted(drawn):
        if case.controls[name].dtype == torch.float64:
            found[name] = _nudged(float(case.controls[name]))
    return case.with_controls(**found)


def _nudged(value: float) -> float:
    """Another number that rounds to the same one in fp32; 0, infinity and NaN stay."""
    near = np.float32(value)
    if not near or not np.isfinite(near):
        return value
    aside = 0.45 * float(np.spacing(abs(near)))
    # A power of two has half the room on the side of zero.
    return float(near) + (aside if abs(value) <= abs(near) else -aside / 2)


def moving(case: Case) -> tuple[str, ...]:
    """Names of what moves to other addresses in turn: gradients, other lists, controls.

    Before them the gradients but for the first and the last, where there are more: a kernel that
    keeps what it made for the call before by less than all addresses is wrong then.
    """
    held = [name for name, tensors in case.lists.items() if any(t.numel() for t in tensors)]
    gradients = [name for name in case.operation.lists_of(Role.GRAD) if name in held][:1]
    others = [name for name in held if name not in gradients]
    inner = [f"{name}{INNER}" for name in gradients if len(case.lists[name]) > 2]
    return (*inner, *gradients, *others, CONTROLS)


def plan(case: Case, arithmetic: str) -> Plan:
    """Other values of the same sizes, the case, a smaller one, the case twice more; lists move.

    Some calls are compared with the reference, too. The first: a kernel that is tuned on live
    tensors is wrong there and nowhere else. The third, of a buffer, whose places may be kept by
    less than all sizes. Before the case works in the same memory, shorter tensors lie there: what
    was kept by addresses alone is wrong then. The last before lists move has values like the first
    and controls nearby, in the tensors of the second: what was kept by the tensor, or by less than
    the number, is wrong there.
    """
    single = any(argument.single for argument in case.operation.lists)
    stranger = other_values(case)
    # Of a buffer the place of each tensor follows from the sizes before it.
    other = case.taken(range(case.length)[::-1]) if single else smaller(case)
    near = Call(case=nearby(stranger))
    if not single:  # a buffer of other values has another tail
        near = Call(case=replace(near.case, skews=case.skews), reuse=1)
    short = None if single else shorter(case)
    calls = [
        Call(case=stranger),
        Call(case=case),
        Call(case=other),
        Call(case=case, fresh=True),
        *([Call(case=short, reuse=1)] if short else []),
        Call(case=case, reuse=1),
        near,
    ]
    last = len(calls) - 1
    compared = (0, 1, *(2,) * single, *((4,) if short else ()), last)
    again = Same(says="differs when the call is repeated after another one", first=1, second=3)
    there = Same(
        says="differs when the call is repeated in the same memory", first=1, second=last - 1
    )
    # Each stays where it has gone, so that the next call differs from it in one list.
    paths = accumulate((name,) for name in moving(case))
    moved = [Call(case=case, reuse=1, moved=path) for path in paths]
    elsewhere = [
        Same(
            says=f"differs when nothing but the addresses of {call.moved[-1]} has changed",
            first=1,
            second=len(calls) + number,
        )
        for number, call in enumerate(moved)
    ]
    values = (Values(call=number) for number in compared)
    return Plan(calls=(*calls, *moved), checks=(*values, again, there, *elsewhere))


REPEAT = Law(
    name="repeat",
    says="the same call gives the same bits",
    share=0.25,
    plan=plan,
)
