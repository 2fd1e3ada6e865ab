"""Flat buffers: where tensors lie, what fills the gaps, and that reading inverts laying."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.fixed_inputs import anything, bits
from twinstep.reference.buffers import flatten, offsets, unflatten

SIZES = [[], [0], [1], [4], [3, 5, 0, 2], [0, 0, 7], [16, 16], [1] * 9]


@pytest.mark.parametrize("slot", [1, 2, 4, 16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_tensor_starts_in_a_slot_of_its_own(sizes: list[int], slot: int) -> None:
    *starts, end = offsets(sizes, slot)
    assert all(start % slot == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(0 <= at - before < slot for at, before in zip(starts, [0, *ends], strict=False))
    assert end == (ends[-1] if ends else 0)


def poisoned(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slot", [1, 4, 16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_unflatten_inverts_flatten_bit_for_bit(
    sizes: list[int], slot: int, dtype: torch.dtype
) -> None:
    tensors = [anything(size, index, dtype) for index, size in enumerate(sizes)]
    room = offsets(sizes, slot)[-1] + 5
    flat = flatten(tensors, poisoned(room, dtype), slot=slot)
    back = unflatten(flat, [poisoned(size, dtype) for size in sizes], slot=slot)
    assert [bits(t) for t in back] == [bits(t) for t in tensors]
    again = flatten(back, poisoned(room, dtype), slot=slot)
    assert bits(again) == bits(flat)


def test_gaps_and_tail_are_positive_zero() -> None:
    tensors = [-torch.ones(3), -torch.ones(1)]
    flat = flatten(tensors, poisoned(8, torch.float32), slot=4)
    assert bits(flat) == bits(torch.tensor([-1.0, -1, -1, 0, -1, 0, 0, 0]))


def test_shapes_are_kept_and_memory_is_not_shared() -> None:
    flat, like = torch.arange(12.0), torch.zeros(2, 3)
    (back,) = unflatten(flat, [like], slot=4)
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]
    back += 1
    assert flat[0] == 0


def test_a_buffer_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="flat has 4 elements, but should have at least 5"):
        flatten([torch.zeros(3), torch.zeros(1)], torch.zeros(4), slot=4)
    with pytest.raises(ValueError, match=r"tensors\[0\] is torch.float16, but should be"):
        unflatten(torch.zeros(4), [torch.zeros(4).half()], slot=4)
    with pytest.raises(ValueError, match="slot=0, but should be at least 1"):
        offsets([1], 0)
