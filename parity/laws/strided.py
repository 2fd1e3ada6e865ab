"""Matrices stored column after column are handled, or refused with a clear error.

For kernels that claim `strided`; the operations themselves promise contiguous tensors. All lists
hold matrices; first those of one list, then those of all are stored column after column. Each call
gives the same results, or is refused with an error that gives a reason, with every byte unchanged.

Real bugs: kernels that walk over raw storage update transposed parameters wrongly or not at all
(bitsandbytes-foundation/bitsandbytes#1187, bitsandbytes-foundation/bitsandbytes#1902); the layout
tested for each tensor alone, so that a channels-last weight meets a row-major gradient and elements
are paired in the wrong order (NVIDIA/apex#732, pytorch/pytorch#106951, pytorch/pytorch#126585).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.plan import Call, Plan, Same, Values

WIDTH = 5


def matrices(case: Case) -> Iterable[Case]:
    """The case with every tensor cut to a matrix of five columns."""

    def matrix(tensor: Tensor) -> Tensor:
        if is_counter(tensor):
            return tensor
        # One row alone is stored by columns and by rows.
        flat = tensor.reshape(-1).repeat(-(-2 * WIDTH // max(1, tensor.numel())))
        rows = flat.numel() // WIDTH
        return flat[: rows * WIDTH].view(rows, WIDTH)

    single = {argument.name for argument in case.operation.lists if argument.single}
    lists = {
        name: list(tensors) if name in single else [matrix(tensor) for tensor in tensors]
        for name, tensors in case.lists.items()
    }
    return [case.with_lists(lists)]


def plan(case: Case, arithmetic: str) -> Plan:
    """The case, one list stored column after column, and all."""
    names = tuple(case.lists)
    one = replace(case, columns=frozenset(names[1:2] or names))
    every = replace(case, columns=frozenset(names))
    calls = (Call(case=case), Call(case=one, may_refuse=True), Call(case=every, may_refuse=True))
    if arithmetic != "exact":
        return Plan(calls=calls, checks=tuple(Values(call=number) for number in range(3)))
    says = "depends on how matrices are stored"
    return Plan(calls=calls, checks=(Same(says=says, second=1), Same(says=says, second=2)))


STRIDED = Law(
    name="strided",
    says="matrices stored by columns are handled, or refused with a clear error",
    share=0.15,
    draw=Draw(sizes="small"),
    vary=matrices,
    plan=plan,
    claim="strided",
)
