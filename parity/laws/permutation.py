"""The order of the tensors does not matter, nor how the elements are cut into tensors.

The list is put into another order; where all tensors have one dtype and one step count it is also
joined into a single tensor, unless the operation takes the norm of each; a single tensor is turned
end for end. Exact kernels leave the same
bits; bounded kernels agree with the reference each time, because a vectorised middle and a scalar
tail may round differently.

Real bugs: one tensor's step count or moment used for its neighbour; results that depend on the
position in a block; a reduction whose grid decides the norm; dtype groups joined in the wrong
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parity.case import Case
from parity.laws.base import Draw, Law
from parity.plan import Call, Check, Piece, Plan, Same, Values

Lists = Mapping[str, Sequence[Tensor]]


def plan(case: Case, arithmetic: str) -> Plan:
    """The case and its rearrangements."""
    calls, checks = [Call(case=case)], list[Check]()
    if arithmetic != "exact":
        checks.append(Values(call=0))
    for says, other, where in _rearranged(case):
        calls.append(Call(case=other))
        number = len(calls) - 1
        if arithmetic == "exact":
            checks.append(Same(says=says, second=number, where=where))
        else:
            checks.append(Values(call=number))
    return Plan(calls=tuple(calls), checks=tuple(checks))


def _rearranged(case: Case) -> list[tuple[str, Case, tuple[Piece, ...]]]:
    lists, length = case.lists, case.length
    if length <= 1:
        return [("depends on the order of the elements", *_flipped(case))]
    # Swap the ends and turn the rest by one: no symmetry of pairing or of position survives that.
    order = [length - 1, *range(2, length - 1), 1, 0] if length > 3 else list(range(length))[::-1]
    turned = {n: [ts[at] for at in order] if len(ts) else [] for n, ts in lists.items()}
    skews = {n: [skew[at] for at in order] if len(skew) else [] for n, skew in case.skews.items()}
    back = tuple(Piece(index=order.index(at), start=0) for at in range(length))
    turned_case = replace(case.with_lists(turned), skews=skews)
    found = [("depends on the order of the tensors", turned_case, back)]
    if _joinable(case):
        found.append(("depends on how the elements are cut into tensors", *_joined(case)))
    return found


def _flipped(case: Case) -> tuple[Case, tuple[Piece, ...]]:
    turned = {
        name: [t if t.dim() == 0 else t.reshape(-1).flip(0).reshape(t.shape) for t in tensors]
        for name, tensors in case.lists.items()
    }
    where = tuple(Piece(index=0, start=case.numel - 1, step=-1) for _ in range(case.length))
    return case.with_lists(turned), where


def _joinable(case: Case) -> bool:
    one_dtype = all(len({t.dtype for t in tensors}) <= 1 for tensors in case.lists.values())
    steps = [t.item() for tensors in case.lists.values() for t in tensors if t.dim() == 0]
    apart = case.operation.whole_tensors
    return one_dtype and len(set(steps)) <= 1 and case.recipe.layout == "list" and not apart


def _joined(case: Case) -> tuple[Case, tuple[Piece, ...]]:
    joined: dict[str, list[Tensor]] = {}
    for name, tensors in case.lists.items():
        if not tensors:
            joined[name] = []
        elif tensors[0].dtype == torch.int64:
            joined[name] = [tensors[0]]
        else:
            joined[name] = [torch.cat([tensor.reshape(-1) for tensor in tensors])]
    lead = next(tensors for tensors in case.lists.values() if len(tensors))
    pieces, start = [], 0
    for tensor in lead:
        pieces.append(Piece(index=0, start=start))
        start += tensor.numel()
    return case.with_lists(joined), tuple(pieces)


PERMUTATION = Law(
    name="permutation",
    says="order, joining and splitting of tensors do not matter",
    share=0.35,
    draw=Draw(sizes="several", one_step=True),
    plan=plan,
)
