"""Options that differ between ranks: refused on all, before anything is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twinstep.fast
import twinstep.reference.optimizers.fused_adam
import twinstep.reference.optimizers.fused_lamb
import twinstep.reference.optimizers.zero
from twinstep.parity.ranks.world import Rank, World

SIDES = {
    "reference": (
        twinstep.reference.optimizers.fused_adam.FusedAdam,
        twinstep.reference.optimizers.zero.ZeroOptimizer,
    ),
    "fast": (twinstep.fast.FusedAdam, twinstep.fast.ZeroOptimizer),
}

LAMBS: dict[str, Any] = {
    "reference": twinstep.reference.optimizers.fused_lamb.FusedLamb,
    "fast": twinstep.fast.FusedLamb,
}


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", [1, 2])
def test_lamb_has_one_trust_ratio_for_the_partition_of_a_rank(side: str, size: int) -> None:
    lamb: Any = LAMBS[side]
    zero: Any = SIDES[side][1]
    starts = (torch.full((2,), 1.0), torch.full((6,), 8.0))  # a cut through the second
    flat = torch.cat(starts)
    parts = [torch.nn.Parameter(part.clone()) for part in flat.chunk(size)]
    for part in parts:
        part.grad = torch.ones_like(part)
    lamb([{"params": [part]} for part in parts], lr=0.5).step()
    wanted = torch.cat([part.detach() for part in parts])

    def one(rank: Rank) -> torch.Tensor:
        params = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = zero(
            lamb([{"params": params}], lr=0.5),
            param_names={param: f"p{slot}" for slot, param in enumerate(params)},
            dp_process_group=rank.group("data"),
        )
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.reduce_gradients()
        optimizer.step()
        return torch.cat([param.detach() for param in params])

    for found in World(size).run(one):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("dtype", "name", "other"),
    [
        (torch.bfloat16, "check_grad_overflow", False),
        (torch.bfloat16, "elastic_checkpoint", False),
        (torch.bfloat16, "round_robin_gradients", True),
        (torch.bfloat16, "clip_grad", 0.5),
        (torch.float16, "static_loss_scale", 8.0),
        (torch.float16, "dynamic_loss_scale", True),
    ],
)
def test_what_differs_is_named_on_every_rank(
    side: str, dtype: torch.dtype, name: str, other: object
) -> None:
    adam, zero = SIDES[side]

    def one(rank: Rank) -> str:
        weight = torch.nn.Parameter(torch.ones(9, dtype=dtype))
        options: dict[str, Any] = {name: other} if rank.number == 1 else {}
        with pytest.raises(ValueError, match="should be the same on all") as caught:
            zero(
                adam([weight], lr=0.5),
                param_names={weight: "weight"},
                dp_process_group=rank.group("data"),
                **options,
            )
        return str(caught.value)

    found = World(2).run(one)
    told = "loss_scale" if "scale" in name else name
    assert all(text.startswith(f"{told} is ") for text in found)
