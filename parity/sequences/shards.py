"""Shards of DeepSpeed's ZeRO, made of drawn values: a file for each rank that saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from twinstep.parity.sequences.fills import filled
from twinstep.parity.sequences.world import World

MASTERS, MEANS, SQUARES = "fp32", "exp_avg", "exp_avg_sq"
SeedOf = Callable[[Tensor, int], int]


def shards(
    world: World,
    scale: Mapping[str, object],
    seed: int,
    count: int,
    *,
    dealt: bool,
    padded: bool,
    seed_of: SeedOf,
) -> list[dict[str, object] | None]:
    """The files, in the order of their ranks.

    Args:
        world: whose parameters were saved, those that were trained at first.
        scale: state of the loss scaler.
        seed: of the values.
        count: ranks that saved.
        dealt: parameters lie in round-robin order.
        padded: some zeros lie behind parameters.
        seed_of: seed of the values of a parameter, from that of its place.
    """
    marked = iter(zip(world.params, cast("list[bool]", world.more["trained"]), strict=False))
    groups = [
        [param for param, trained in islice(marked, size) if trained]
        for size in cast("list[int]", world.more["groups"])
    ]
    paddings = [[(seed + at) % 3 * padded for at in range(len(group))] for group in groups]
    cut = [
        {
            kind: _cut(_flat(group, zeros, kind, own, count if dealt else 1, seed_of), count)
            for kind in (MASTERS, MEANS, SQUARES)
        }
        for own, group, zeros in zip(range(seed, seed + 999, 90), groups, paddings, strict=False)
    ]
    scaler = SimpleNamespace(**{"cur_scale": 1.0, **scale}, dynamic=scale["dynamic_loss_scale"])
    return [
        {
            "optimizer_state_dict": {
                "zero_stage": 2,
                "clip_grad": 0.5,
                "ds_version": "0.16.0",
                "loss_scaler": scaler,
                "partition_count": [count] * len(groups),
                "param_alignment_paddings": paddings,
                "single_partition_of_fp32_groups": [row[MASTERS][rank] for row in cut],
                "base_optimizer_state": [
                    {"step": seed % 1000, MEANS: row[MEANS][rank], SQUARES: row[SQUARES][rank]}
                    for row in cut
                ],
            },
            "ds_config": {"zero_optimization": {"round_robin_gradients": dealt}},
        }
        for rank in range(count)
    ]


def _flat(
    group: Sequence[Tensor],
    zeros: Sequence[int],
    kind: str,
    seed: int,
    deal: int,
    seed_of: SeedOf,
) -> Tensor:
    """Values of one kind for a group, dealt to so many ranks in turn."""
    turns = [at for first in range(deal) for at in range(first, len(group), deal)]
    rows = [torch.zeros(0)]
    for at, behind in zip(turns, zeros, strict=True):
        own = seed_of(group[at], seed + 3 * at + len(kind))
        values = filled((group[at].numel(),), torch.float32, "ordinary", own)
        rows += [values.abs() if kind == SQUARES else values, torch.zeros(behind)]
    return torch.cat(rows)


def _cut(flat: Tensor, count: int) -> list[Tensor]:
    """Parts of an even length for each rank; what is left at the end is shorter."""
    size = -(-flat.numel() // (2 * count)) * 2
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(count)]
