"""Experts: who is one, groups of their own, and norms in which every expert counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twinstep.contract.moe import is_moe_param, split_moe_groups, split_shared_and_expert
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.model_norm import norm_of_parts


def param(size: int, expert: str = "", value: float = 1.0) -> nn.Parameter:
    made = nn.Parameter(torch.full((size,), value, dtype=torch.float16))
    if expert:
        made.allreduce = False  # type: ignore[attr-defined]
        made.group_name = expert  # type: ignore[attr-defined]
    return made


def test_an_expert_is_what_is_not_reduced_over_all_ranks() -> None:
    shared, expert, marked = param(1), param(1, "a"), param(1)
    marked.allreduce = True  # type: ignore[attr-defined]
    assert [is_moe_param(p) for p in (shared, expert, marked)] == [False, True, False]
    assert split_shared_and_expert([expert, shared, marked]) == ([shared, marked], [expert])


def test_experts_get_groups_of_their_own_with_the_options_of_their_group() -> None:
    a, b, c, d = param(2), param(3, "x"), param(4, "y"), param(5, "x")
    groups = split_moe_groups([{"params": [a, b, c], "lr": 0.5}, {"params": [d], "lr": 0.25}])
    assert groups == [
        {"params": [a], "lr": 0.5},
        {"params": [], "lr": 0.25},
        {"params": [b], "lr": 0.5, "name": "x", "moe": True},
        {"params": [c], "lr": 0.5, "name": "y", "moe": True},
        {"params": [d], "lr": 0.25, "name": "x", "moe": True},
    ]


@pytest.mark.parametrize(
    ("sizes", "limit", "pieces"),
    [
        ([10], 4, [[10]]),
        ([10, 1], 4, [[10], [1]]),
        ([2, 2, 1], 4, [[2, 2], [1]]),
        ([3, 2, 1], 4, [[3], [2, 1]]),
        ([2, 3], None, [[2, 3]]),
    ],
)
def test_no_group_of_experts_is_empty_or_too_large(
    sizes: list[int], limit: int | None, pieces: list[list[int]]
) -> None:
    """Edges ME-1 and ME-2."""
    experts = [param(size, "x") for size in sizes]
    given: list[dict[str, object]] = [{"params": experts}, {"params": [param(1)]}]
    _, _, *made = split_moe_groups(given, max_group_size=limit)
    found = [group["params"] for group in made]
    assert all(isinstance(params, list) for params in found)
    assert [[p.numel() for p in params] for params in found if isinstance(params, list)] == pieces


def test_something_that_is_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"groups\[0\] is a list, but should be a group"):
        split_moe_groups([[param(1)]])  # type: ignore[list-item]


def test_the_norm_of_experts_is_that_of_their_gradients() -> None:
    """Edge NM-10: weights of 100 do not enter."""
    shared, expert = param(4), param(4, "ep_size_1", value=100.0)
    inside = torch.optim.SGD([{"params": [shared]}], lr=1.0)
    inside.add_param_group({"params": [expert], "moe": True})
    optimizer = FP16Optimizer(inside, has_moe_layers=True)
    for p in (shared, expert):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.get_global_norm() == pytest.approx(8.0**0.5)
    assert norm_of_parts([]).item() == 0.0
