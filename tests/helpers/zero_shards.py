"""Shards of DeepSpeed's ZeRO, and optimizers of ours that load them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.sides import CLASSES
from tests.helpers.zero_built import Group, place
from twinstep.contract.checkpoint import read_checkpoint
from twinstep.golden.record_zero import FOLDER, SCALING, Made, groups_of, loss_of, weights_of

Entry = dict[str, Any]


def shards(made: Made) -> list[Entry]:
    """The files of all ranks that saved."""
    return [read_checkpoint(FOLDER / made.name / made.shard(rank)) for rank in range(made.world)]


def states(made: Made) -> list[Entry]:
    """Entries as DeepSpeed's engine hands them to its optimizer."""
    return [shard["optimizer_state_dict"] for shard in shards(made)]


def built(
    side: str,
    made: Made,
    group: Group,
    make: Callable[..., Any] | None = None,
    prefix: str = "",
    **options: Any,
) -> tuple[list[torch.nn.Parameter], Any]:
    """An optimizer of other weights, around torch's AdamW as DeepSpeed's was."""
    params = weights_of(made.dtype)
    with torch.no_grad():
        for param in params:
            param.fill_(7.0)
    inner = torch.optim.AdamW(groups_of(params))
    for row in inner.param_groups if not made.elastic else ():
        row.update(lr=9.0, weight_decay=9.0)
    given: Entry = {
        "param_names": {param: f"{prefix}p{at}" for at, param in enumerate(params)},
        "dp_process_group": group,
        "dynamic_loss_scale": made.dtype == "fp16",
        "dynamic_loss_args": SCALING,
        "partition_grads": made.stage == 2,
        "verbose": False,
        **options,
    }
    return params, (make or CLASSES[side]["ZeroOptimizer"])(inner, **given)


def trained(
    params: list[torch.nn.Parameter], optimizer: Any, group: Group, world: int, steps: range
) -> None:
    for step in steps:
        optimizer.backward(loss_of(params, step, place(group), world))
        optimizer.step()
