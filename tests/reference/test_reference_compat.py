"""Counting the steps of a group: each parameter for itself, or one for all as upstream."""

from __future__ import annotations

import torch

from twinstep.reference.optimizers.fused_adam import count_shared

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def test_counting_shared_advances_the_last_once_for_each_dtype_in_order() -> None:
    used, stored = count_shared([7, 7, 7, 2], [SINGLE, HALF, BRAIN, HALF])
    assert stored == [7, 7, 7, 5]
    assert used == [5, 3, 4, 3]
    assert count_shared([], []) == ([], [])
