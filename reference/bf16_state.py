"""State dicts of `BF16Optimizer`: what one rank owns, and how entries of all ranks are joined.

An entry holds the clip norm, the dict of the optimizer inside, this rank's masters with padding,
and where each parameter lies in them. The keys are those of DeepSpeed's `BF16_Optimizer`; the
values are tensors and plain values alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from reference.bf16_groups import PartitionedGroup
from reference.checkpoint import (
    inner_state,
    matching_tensors,
    parsed_inner_state,
    require_keys,
)
from reference.restore import StateDict
from reference.scaled_wrapper import checked_clip

MASTERS = "single_partition_of_fp32_groups"
INNER = "base_optimizer_state"
# The layout of the dict is that of this version of DeepSpeed.
FORMAT = "0.19.8"
WHERE = "BF16Optimizer.load_state_dict"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a rank takes from a checkpoint; everything fits.

    Attributes:
        inner: dict for the optimizer inside.
        masters: one per group, as long as this rank's.
        clip_grad: None where the checkpoint has none.
    """

    inner: StateDict
    masters: list[Tensor]
    clip_grad: float | None


def saved(
    groups: Sequence[PartitionedGroup], optimizer: torch.optim.Optimizer, clip_grad: float
) -> StateDict:
    """The entry of this rank; copies, not views."""
    return {
        "clip_grad": clip_grad,
        INNER: copy.deepcopy(optimizer.state_dict()),
        MASTERS: [group.master.detach().clone() for group in groups],
        "group_paddings": [group.padding for group in groups],
        "partition_count": [group.world for group in groups],
        "ds_version": FORMAT,
        "param_slice_mappings": [
            {name: vars(fragment.in_partition) for name, fragment in group.fragments.items()}
            for group in groups
        ],
    }


def checked(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    entries: Sequence[StateDict],
) -> Loaded:
    """What this rank takes from the entries of all ranks that saved.

    Args:
        groups: as they are now.
        optimizer: the one inside.
        entries: in the order of ranks. As many as there are ranks now: each takes its own, and
            the others may be None. Otherwise all are joined and cut anew.

    Raises:
        ValueError: something does not fit.
    """
    if not isinstance(entries, list | tuple) or not entries:
        raise ValueError(f"states should be a list with one entry per rank, but are not [{WHERE}]")
    worlds = {group.world for group in groups}
    rank = max(group.rank for group in groups)
    if len(worlds) == 1 and len(entries) == max(worlds):
        entry = _checked_entry(entries[rank], rank)
    else:
        parts = [_checked_entry(each, number) for number, each in enumerate(entries)]
        entry = _joined(groups, parts)
    masters = [group.master for group in groups]
    fitting = matching_tensors(entry[MASTERS], masters, MASTERS, WHERE, shorter=True)
    inner = inner_state(optimizer, entry, INNER, WHERE)
    has_clip = "clip_grad" in entry
    clip = checked_clip(entry, 0.0, WHERE) if has_clip else None
    return Loaded(inner=inner, masters=fitting, clip_grad=clip)


def _checked_entry(entry: object, rank: int) -> StateDict:
    where = f"entry {rank}, {WHERE}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"state is a {type(entry).__name__}, but should be a dict [{where}]")
    require_keys(entry, ("ds_version", INNER, MASTERS), where)
    if not entry["ds_version"]:
        raise ValueError(f"ds_version is empty, but should name a version [{where}]")
    return dict(entry)


def _joined(groups: Sequence[PartitionedGroup], entries: Sequence[StateDict]) -> StateDict:
    """One entry for this rank from those of another number of ranks."""
    first = entries[0]
    masters = [cast(Sequence[Tensor], entry[MASTERS]) for entry in entries]
    if any(len(row) != len(groups) for row in masters):
        got = [len(row) for row in masters]
        raise ValueError(f"{MASTERS} has {got} tensors, but should have {len(groups)} [{WHERE}]")
    inner = copy.deepcopy(parsed_inner_state(first, INNER, WHERE))
    states = [
        cast(Mapping[int, Mapping[str, object]], parsed_inner_state(entry, INNER, WHERE)["state"])
        for entry in entries
    ]
    cut = cast(dict[int, dict[str, object]], inner["state"])
    for number, group in enumerate(groups):
        for key, value in states[0].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim():
                parts = [cast(Tensor, state[number][key]) for state in states]
                cut[number][key] = _recut(group, parts)
    joined = [
        _recut(group, [row[number] for row in masters]) for number, group in enumerate(groups)
    ]
    return {**first, INNER: inner, MASTERS: joined}


def _recut(group: PartitionedGroup, parts: Sequence[Tensor]) -> Tensor:
    """This rank's partition of a tensor that lies in parts, whatever padding they end in."""
    whole = torch.cat([part.detach().reshape(-1) for part in parts])
    if whole.numel() < group.numel:
        raise ValueError(
            f"partitions have {whole.numel()} elements together, but should have at least "
            f"{group.numel} [{WHERE}]"
        )
    padded = torch.zeros(group.partition_size * group.world, dtype=whole.dtype)
    padded[: group.numel] = whole[: group.numel]
    return group.own(padded).clone()
