"""Tensors in the order of their memory: what lets one kernel serve any dense layout."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from twinstep.fast.runtime.lists import FixedTensors, MovingTensors
from twinstep.fast.runtime.recorder import refuse


def steps_of(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of every dimension that has one to speak of."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in pairs if size != 1]


def is_dense(tensor: Tensor) -> bool:
    """Say whether the elements fill their memory without gaps or overlaps, in any order.

    >>> is_dense(torch.empty(3, 4).t()), is_dense(torch.empty(3, 4)[:, :2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(steps_of(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a 1-D view of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def contiguous(row: Sequence[Tensor]) -> bool:
    """Return True if all tensors of a parameter lie in memory in the order of their indices."""
    return all(tensor.is_contiguous() for tensor in row)


def aligned_layouts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return 1-D tensors in which element i of each belongs to element i of the others.

    Tensors that are dense and laid out like the first are returned as views of themselves,
    others as copies; `tensors` agree in shape.
    """
    lead = tensors[0]
    if not is_dense(lead):
        lead = torch.empty(lead.shape, dtype=lead.dtype, device="meta")
    flat = []
    for tensor in tensors:
        if steps_of(tensor) != steps_of(lead):
            moved = torch.empty_strided(
                lead.shape, lead.stride(), dtype=tensor.dtype, device=tensor.device
            )
            tensor = moved.copy_(tensor)
        flat.append(in_memory_order(tensor))
    return flat


def contiguous_lists(
    lists: Sequence[Sequence[Tensor]], written: Sequence[int]
) -> AbstractContextManager[Sequence[Sequence[Tensor]]]:
    """Lend kernels contiguous tensors for these, and write back what kernels have written.

    Args:
        lists: for each role one tensor per slot; those of a slot agree in shape. Slots that are
            contiguous are lent as they are, dense ones as views, others as copies.
        written: the roles that kernels write.
    """
    return nullcontext(lists) if are_contiguous(lists) else _lent(lists, written)


def are_contiguous(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return True if all tensors of these lists are contiguous."""
    return all(map(_contiguous, lists))


@contextmanager
def _lent(
    lists: Sequence[Sequence[Tensor]], written: Sequence[int]
) -> Iterator[Sequence[Sequence[Tensor]]]:
    refuse()
    rows = [list(row) for row in zip(*lists, strict=True)]
    lanes = [row if _contiguous(row) else aligned_layouts(row) for row in rows]
    yield [list(role) for role in zip(*lanes, strict=True)]
    for row, lane in zip(rows, lanes, strict=True):
        if lane is not row:
            for role in written:
                write_back(lane[role], row[role], row[0])


def _contiguous(tensors: Sequence[Tensor]) -> bool:
    if isinstance(tensors, FixedTensors):
        return tensors.contiguous
    if isinstance(tensors, MovingTensors):
        return True
    return all(tensor.is_contiguous() for tensor in tensors)


def write_back(flat: Tensor, tensor: Tensor, lead: Tensor) -> None:
    """Copy a 1-D tensor of `aligned_layouts` into the tensor it stands for, if it is a copy."""
    if flat.data_ptr() == tensor.data_ptr():
        return
    strides = lead.stride() if is_dense(lead) else torch.empty(lead.shape, device="meta").stride()
    tensor.copy_(flat.as_strided(tensor.shape, strides))
