"""It does not matter how the elements are cut into tensors.

A list is joined into one tensor where all its tensors have one dtype and one step count; its
longest tensor is cut into many unequal pieces; a single flat tensor is given in two calls, each
with a part. Exact kernels leave the same bits; bounded ones agree with the reference each time.
Operations that take a norm of every tensor do not declare the law.

Real bugs: bias corrections advanced by every call instead of every step
(deepspeedai/DeepSpeed#7982); a staging buffer reused above one tile (deepspeedai/DeepSpeed#735);
tensors queued since the last launch forgotten (NVIDIA/TransformerEngine#3212,
pytorch/pytorch#109402); a launch table that holds a fixed number of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Check, Piece, Plan, Same, Values

SAYS = "depends on how the elements are cut into tensors"
PIECES = 115
Part = tuple[Case, tuple[Piece, ...]]


def plan(case: Case, arithmetic: str) -> Plan:
    """The case, joined and cut."""
    calls, same = [Call(case=case)], list[Same]()
    if case.recipe.layout == "flat" and _separable(case):
        for start, stop in _halves(case.numel):
            calls.append(Call(case=_part(case, start, stop)))
            where: tuple[Piece, ...] = (Piece(index=0, start=start),)
            same.append(Same(says=SAYS, first=len(calls) - 1, second=0, where=where))
    elif case.recipe.layout == "list":
        for other, where in (*_joined(case), *_cut(case)):
            calls.append(Call(case=other))
            first, second = (len(calls) - 1, 0) if len(where) > case.length else (0, len(calls) - 1)
            same.append(Same(says=SAYS, first=first, second=second, where=where))
    checks: list[Check] = list(same)
    if arithmetic != "exact" or not same:
        checks = [Values(call=number) for number in range(len(calls))]
    return Plan(calls=tuple(calls), checks=tuple(checks))


def _separable(case: Case) -> bool:
    """Whether parts can be given in calls of their own: nothing is written but elements."""
    controls = {control.name for control in case.operation.controls}
    return not controls & set(case.operation.writes) and case.numel > 1


def _halves(numel: int) -> tuple[tuple[int, int], ...]:
    middle = max(1, numel * 2 // 5)
    return (0, middle), (middle, numel)


def _part(case: Case, start: int, stop: int) -> Case:
    lists = {
        name: [t.reshape(-1)[start:stop].clone() if not is_counter(t) else t for t in tensors]
        for name, tensors in case.lists.items()
    }
    return case.with_lists(lists)


def _joined(case: Case) -> list[Part]:
    one_dtype = all(len({t.dtype for t in tensors}) <= 1 for tensors in case.lists.values())
    counts = {t.item() for tensors in case.lists.values() for t in tensors if is_counter(t)}
    if not one_dtype or len(counts) > 1 or case.length < 2:
        return []
    joined = {name: [_one(tensors)] if len(tensors) else [] for name, tensors in case.lists.items()}
    pieces, start = [], 0
    for tensor in _lead(case):
        pieces.append(Piece(index=0, start=start))
        start += tensor.numel()
    return [(case.with_lists(joined), tuple(pieces))]


def _one(tensors: Sequence[Tensor]) -> Tensor:
    if is_counter(tensors[0]):
        return tensors[0]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _lead(case: Case) -> list[Tensor]:
    """The longest list: it decides how the elements are cut."""
    return max((list(tensors) for tensors in case.lists.values()), key=lambda row: len(row))


def _cut(case: Case) -> list[Part]:
    """The longest tensor in many pieces, all others unchanged."""
    lead = _lead(case)
    index = max(range(len(lead)), key=lambda at: lead[at].numel())
    sizes = _unequal(lead[index].numel())
    if len(sizes) < 2:
        return []

    def pieces(tensors: list[Tensor]) -> list[Tensor]:
        whole = tensors[index]
        counter = is_counter(whole)
        cut = [whole] * len(sizes) if counter else list(torch.split(whole.reshape(-1), sizes))
        return [*tensors[:index], *cut, *tensors[index + 1 :]]

    lists = {name: pieces(list(ts)) if len(ts) else [] for name, ts in case.lists.items()}
    where, start = [], 0
    for size in sizes:
        where.append(Piece(index=index, start=start))
        start += size
    before = [Piece(index=at, start=0) for at in range(index)]
    after = [Piece(index=at, start=0) for at in range(index + 1, len(lead))]
    return [(case.with_lists(lists), (*before, *where, *after))]


def _unequal(numel: int) -> list[int]:
    """Many sizes that add up to `numel`: 1, 2, 3, 1, 2, 3, ... and the rest."""
    sizes: list[int] = []
    while len(sizes) < PIECES and sum(sizes) + 4 <= numel:
        sizes.append(1 + len(sizes) % 3)
    return [*sizes, numel - sum(sizes)] if sizes else []


SPLITTING = Law(
    name="splitting",
    says="joining and splitting of tensors do not matter",
    share=0.1,
    each_layout=True,
    draw=Draw(sizes="several", one_step=True),
    plan=plan,
)
