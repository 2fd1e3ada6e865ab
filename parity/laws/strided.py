"""Matrices that are not contiguous are handled, or refused with a clear error.

For kernels that claim `strided`; the operations themselves promise contiguous tensors. All lists
hold matrices; those of all are stored column after column, with room between the columns, and with
room between the rows; then, for each list in turn, its own by columns, those of all others by
columns, and its own with room. Each call gives the same results and writes nothing into that room,
or is refused with an error that gives a reason, with every byte unchanged.

Real bugs: kernels that walk over raw storage update transposed parameters wrongly or not at all
(bitsandbytes-foundation/bitsandbytes#1187, bitsandbytes-foundation/bitsandbytes#1902); the layout
tested for each tensor alone, so that a channels-last weight meets a row-major gradient and elements
are paired in the wrong order (NVIDIA/apex#732, pytorch/pytorch#106951, pytorch/pytorch#126585).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from twinstep.parity.cases.case import Case, Storage, is_counter
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Plan, Same, Untouched, Values

WIDTH = 5
GAP = 3


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
    """The case, all lists stored in other ways, and each list otherwise than the others."""
    every = frozenset(case.lists)
    stored = [
        Storage(names=every, columns=True),
        Storage(names=every, columns=True, gap=GAP),
        Storage(names=every, gap=GAP),
    ]
    if len(every) > 1:
        for name in case.lists:
            alone = frozenset((name,))
            stored.append(Storage(names=alone, columns=True))
            stored.append(Storage(names=every - alone, columns=True))
            stored.append(Storage(names=alone, gap=GAP))
    others = [Call(case=replace(case, storage=storage), may_refuse=True) for storage in stored]
    calls = (Call(case=case), *others)
    numbers = range(1, len(calls))
    untouched = tuple(Untouched(call=number) for number in numbers)
    if arithmetic != "exact":
        values = tuple(Values(call=number) for number in range(len(calls)))
        return Plan(calls=calls, checks=(*values, *untouched))
    says = "depends on how matrices are stored"
    same = tuple(Same(says=says, second=number) for number in numbers)
    return Plan(calls=calls, checks=(*same, *untouched))


STRIDED = Law(
    name="strided",
    says="matrices that are not contiguous are handled, or refused with a clear error",
    share=0.15,
    draw=Draw(sizes="small"),
    vary=matrices,
    plan=plan,
    claim="strided",
)
