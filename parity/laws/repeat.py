"""The same call gives the same bits: after other calls, in the same memory, and in part elsewhere.

Real bugs: autotuning on live state (lucidrains/lion-pytorch#36, triton-lang/triton#7181); a result
buffer cached by the length of a list (the norm of deepspeedai/DeepSpeed, its source); atomics whose
order decides the last bits (triton-lang/triton#6227); a scratch buffer that is never cleared; a
table of addresses that outlives what lay there; what was kept by a key that says too little.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import CONTROLS, EXCHANGED, INNER
from twinstep.parity.laws.base import Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Values
from twinstep.parity.operations.operation import Role

# By how much numbers differ that a table kept by a few of their digits takes for one.
SHARES = (2.0**-16, 2.0**-10)
DIFFERS = "differs when the call is repeated"


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
    """Another case of the same sizes: other values, and another value of every control."""
    controls = {
        control.name: control.values[(place + case.recipe.seed) % len(control.values)]
        for place, control in enumerate(case.operation.controls)
    }
    # An odd seed has other shapes than an even one, and state of other sizes where they shape it.
    turned = 0xFFFE if case.operation.shaped else 0xFFFF
    recipe = replace(case.recipe, controls=controls, seed=case.recipe.seed ^ turned)
    if recipe.regime == "planted":
        recipe = replace(recipe, regime="ordinary")
    return generate(case.operation, case.combination, recipe)


def other_options(case: Case) -> Case:
    """Another case of the same sizes: other values, and another choice of every option."""
    options = {
        row.name: row.choices[(row.choices.index(case.options[row.name]) + 1) % len(row.choices)]
        for row in case.operation.options
    }
    case = other_values(case)
    return generate(case.operation, case.combination, replace(case.recipe, options=options))


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


def beside(case: Case, share: float) -> Case:
    """The same case with numbers that are larger or smaller by this share, inside their ranges."""
    found: dict[str, float] = {}
    for control in case.operation.controls:
        value = float(case.controls[control.name])
        turned = [value * (1 + way * share) for way in (1, -1)]
        inside = [one for one in turned if control.range and control.bounded(one)]
        if control.dtype.is_floating_point and inside and math.isfinite(value):
            found[control.name] = inside[0]
    return case.with_controls(**found)


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


def twenty(case: Case, middle: tuple[int, int]) -> Case:
    """A case of the same kind with twenty tensors, all of one size but for those in the middle."""
    sizes = (*(130,) * 9, *middle, *(130,) * 9)
    return generate(case.operation, case.combination, replace(case.recipe, sizes=sizes))


def plan(case: Case, arithmetic: str) -> Plan:
    """Other values of the same sizes, the case, a smaller one, the case twice more; lists move.

    Some calls are compared with the reference, too. The first: a kernel that is tuned on live
    tensors is wrong there and nowhere else. The third, of a buffer, whose places may be kept by
    less than all sizes. Before the case works in the same memory, shorter tensors lie there: what
    was kept by addresses alone is wrong then. The last before lists move have values like the first
    and controls nearby, in the tensors of the second: what was kept by the tensor, or by less than
    the number, is wrong there. In the end gradients of one size exchange their addresses: a table
    that was kept by the sum of all is wrong. Then two tensors in the middle exchange their sizes:
    one that was kept by some of the sizes, their number and their sum is.
    """
    single = any(argument.single for argument in case.operation.lists)
    stranger = other_values(case)
    # Of a buffer the place of each tensor follows from the sizes before it.
    other = case.taken(range(case.length)[::-1]) if single else smaller(case)
    near = [nearby(stranger), *(beside(stranger, share) for share in SHARES)]
    short = None if single else shorter(case)
    calls = [Call(case=stranger)]
    calls += [Call(case=other_options(case))] if case.options else []
    own = len(calls)
    calls += [Call(case=case), Call(case=other), Call(case=case, fresh=True)]
    compared = [*range(own + 1), *(own + 1,) * single]
    checks = [Same(says=f"{DIFFERS} after another one", first=own, second=own + 2)]
    if short:
        compared.append(len(calls))
        calls.append(Call(case=short, reuse=own))
    checks.append(Same(says=f"{DIFFERS} in the same memory", first=own, second=len(calls)))
    calls.append(Call(case=case, reuse=own))
    compared += range(len(calls), len(calls) + len(near))
    for one in near:
        # A buffer of other values has another tail.
        alike = Call(case=replace(one, skews=case.skews), reuse=own)
        calls.append(Call(case=one) if single else alike)
    # Each stays where it has gone, so that the next call differs from it in one list.
    for path in accumulate((name,) for name in moving(case)):
        says = f"differs when nothing but the addresses of {path[-1]} has changed"
        checks.append(Same(says=says, first=own, second=len(calls)))
        calls.append(Call(case=case, reuse=own, moved=path))
    if not single and case.length > 1:
        says = "differs when gradients of one size have exchanged their addresses"
        checks.append(Same(says=says, first=len(calls), second=len(calls) + 1))
        gradients = tuple(f"{n}{EXCHANGED}" for n in case.operation.lists_of(Role.GRAD)[:1])
        even = twenty(case, (60, 200))
        calls += [Call(case=even), Call(case=even, reuse=len(calls), moved=gradients)]
        compared.append(len(calls))
        calls.append(Call(case=twenty(case, (200, 60))))
    values = (Values(call=number) for number in compared)
    return Plan(calls=tuple(calls), checks=(*values, *checks))


REPEAT = Law(
    name="repeat",
    says="the same call gives the same bits",
    share=0.25,
    plan=plan,
)
