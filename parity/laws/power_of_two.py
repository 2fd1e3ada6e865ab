"""A power of two moved between loss scale and gradient does not matter.

Gradients times 2^k under a loss scale times 2^k give the same step, bit for bit, as long as every
number that is moved stays representable: what cannot be moved is made zero first. The power is as
large as the format allows, so that scales come up that are far from any usual one. A norm of
gradients, a factor and a scale are themselves multiplied. Exact kernels leave the same bits;
bounded kernels agree with the reference each time.

Real bugs: clipping by the norm of the scaled gradients (NVIDIA/apex#1512,
Lightning-AI/pytorch-lightning#9330); the scale updated before it was divided out
(deepspeedai/DeepSpeed#8588); a gradient divided by a scale that was never applied
(deepspeedai/DeepSpeed#7839); a scale that grows to infinity (pytorch/pytorch#98828).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.expected.ulp import same
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Values
from twinstep.parity.operations.operation import Operation, Role

POWERS = (24, -24, 11, -11, 5, -5, 1, -1)
WITH_GRADIENT = {"factor": -1, "inv_scale": -1, "scale": 1, "min_scale": 1, "norm": 1}


def _moves(case: Case) -> dict[str, int]:
    """Sign of the power for every control that is read."""
    return {
        control.name: WITH_GRADIENT[control.name]
        for control in case.operation.controls
        if control.name in WITH_GRADIENT and not control.output
    }


def _results(case: Case) -> dict[str, int]:
    """Sign of the power for every control that is written."""
    scaled = any(control.name == "scale" for control in case.operation.controls)
    signs = {"scale": 1, "factor": -1, "norm": 0 if scaled else 1}
    return {name: signs[name] for name in case.operation.writes if signs.get(name)}


def moved(case: Case, power: int) -> Case:
    """Gradients and controls times their power of two."""
    names = case.operation.lists_of(Role.GRAD)
    lists = {
        name: [_times(t, power) for t in tensors] if name in names else tensors
        for name, tensors in case.lists.items()
    }
    controls = {
        name: float(_times(case.controls[name], sign * power).item())
        for name, sign in _moves(case).items()
    }
    return case.with_lists(lists).with_controls(**controls)


def _times(tensor: Tensor, power: int) -> Tensor:
    return (tensor.to(torch.float64) * 2.0**power).to(tensor.dtype)


def _stays(tensor: Tensor, power: int) -> Tensor:
    return same(_times(_times(tensor, power), -power), tensor)


def _movable(case: Case, power: int) -> bool:
    """Whether controls and results stay representable; the reference itself decides."""
    if not all(bool(_stays(case.controls[n], s * power).all()) for n, s in _moves(case).items()):
        return False
    if not _results(case):
        return True
    other = moved(case, power)
    before, after = case.reference(), other.reference()
    return all(
        bool(same(_times(one, sign * power), two).all())
        for name, sign in _results(case).items()
        for one, two in zip(before[name], after[name], strict=True)
    )


def _thinned(case: Case, power: int) -> Case:
    """Gradients that would not survive the move become zero."""
    names = case.operation.lists_of(Role.GRAD)
    lists: Mapping[str, list[Tensor]] = {
        name: [torch.where(_stays(t, power), t, torch.zeros_like(t)) for t in tensors]
        if name in names
        else list(tensors)
        for name, tensors in case.lists.items()
    }
    return case if not names else case.with_lists(lists)


def _powers(case: Case) -> list[int]:
    """Powers that the gradients' format has room for, those of the case's own sign first."""
    dtypes = {t.dtype for n in case.operation.lists_of(Role.GRAD) for t in case.lists[n]}
    most = 11 if torch.float16 in dtypes else 24
    turn = -1 if case.recipe.guard == 0xFF else 1
    powers = [turn * power for power in POWERS if abs(power) <= most]
    return [p for p in powers if p * turn > 0] + [p for p in powers if p * turn < 0]


def thinned(case: Case) -> Iterable[Case]:
    """The case with what the first possible power would not move made zero."""
    for power in _powers(case):
        candidate = _thinned(case, power)
        if _movable(candidate, power):
            return [candidate]
    return [case]


def plan(case: Case, arithmetic: str) -> Plan:
    """The case, and moved by the first power that it survives."""
    grads = [t for name in case.operation.lists_of(Role.GRAD) for t in case.lists[name]]
    found = [
        power
        for power in _powers(case)
        if all(bool(_stays(t, power).all()) for t in grads) and _movable(case, power)
    ][:1]
    calls = (Call(case=case), *(Call(case=moved(case, power)) for power in found))
    if arithmetic != "exact" or not found:
        return Plan(calls=calls, checks=tuple(Values(call=n) for n in range(len(calls))))
    powers = tuple((name, sign * found[0]) for name, sign in _results(case).items())
    says = f"depends on whether 2^{found[0]} is in the loss scale or in the gradient"
    return Plan(calls=calls, checks=(Same(says=says, powers=powers),))


def idle(operation: Operation, combination: str) -> str:
    """Without a loss scale there is nowhere to move a power to."""
    names = {control.name for control in operation.controls}
    return "" if names & set(WITH_GRADIENT) else "no loss scale among the arguments"


POWER_OF_TWO = Law(
    name="power_of_two",
    says="a power of two may stand in the loss scale or in the gradient",
    share=0.2,
    draw=Draw(regimes=("ordinary", "cancelling", "mixture")),
    vary=thinned,
    plan=plan,
    idle=idle,
)
