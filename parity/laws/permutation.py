"""The order of the tensors does not matter, nor that of the elements.

The list is put into another order while every tensor stays where it lies in memory, so that list
order and address order part ways; a single tensor is turned end for end. Exact kernels leave the
same bits; bounded kernels agree with the reference each time, because a vectorised middle and a
scalar tail may round differently.

Real bugs: the last parameter's step count used for its neighbours (deepspeedai/DeepSpeed#8471);
gradients arriving in another order paired with the wrong parameters (deepspeedai/DeepSpeed#2343);
a slice taken by the position in another list (deepspeedai/DeepSpeed#2058); a table of addresses
that is taken to be sorted.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, uint8

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.laws.base import Draw, Law
from twinstep.parity.laws.call import Call
from twinstep.parity.laws.plan import Piece, Plan, Same, Values


def plan(case: Case, arithmetic: str) -> Plan:
    """The case and its rearrangement."""
    if case.length <= 1 and case.operation.shaped:
        # Elements of a block, or of a matrix, belong together.
        return Plan(calls=(Call(case=case),), checks=(Values(),))
    says, other, where = _flipped(case) if case.length <= 1 else _turned(case)
    calls = (Call(case=case), Call(case=other))
    if arithmetic != "exact":
        return Plan(calls=calls, checks=(Values(call=0), Values(call=1)))
    return Plan(calls=calls, checks=(Same(says=says, where=where),))


def _turned(case: Case) -> tuple[str, Case, tuple[Piece, ...]]:
    """Another order of the list, the same order in memory."""
    length = case.length
    # Swap the ends and turn the rest by one: no symmetry of pairing or of position survives that.
    order = [length - 1, *range(2, length - 1), 1, 0] if length > 3 else list(range(length))[::-1]
    back = tuple(order.index(at) for at in range(length))
    other = replace(case.taken(order), placement=back)
    where = tuple(Piece(index=at, start=0) for at in back)
    return "depends on the order of the tensors", other, where


def _flipped(case: Case) -> tuple[str, Case, tuple[Piece, ...]]:
    turned = {
        name: [t if is_counter(t) else _reversed(t) for t in tensors]
        for name, tensors in case.lists.items()
    }
    where = tuple(Piece(index=0, start=case.numel - 1, step=-1) for _ in range(case.length))
    return "depends on the order of the elements", case.with_lists(turned), where


def _reversed(tensor: Tensor) -> Tensor:
    """The elements in reverse, as bytes: torch turns no 8-bit floats round."""
    return tensor.reshape(-1, 1).view(uint8).flip(0).view(tensor.dtype).reshape(tensor.shape)


PERMUTATION = Law(
    name="permutation",
    says="the order of tensors and of elements does not matter",
    share=0.35,
    draw=Draw(sizes="several"),
    plan=plan,
)
