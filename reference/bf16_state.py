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

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.errors import in_words
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.reference.bf16_groups import PartitionedGroup
from twinstep.reference.checkpoint import matching_tensors, require_keys
from twinstep.reference.fitting import inner_state, parsed_inner_state
from twinstep.reference.scaled_wrapper import checked_clip

MASTERS = "single_partition_of_fp32_groups"
INNER = "base_optimizer_state"
# The layout of the dict is that of this version of DeepSpeed.
FORMAT = "0.19.8"
WHERE = "BF16Optimizer.load_state_dict"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a rank takes from a checkpoint; everything fits.

    Attributes:
        inner: dict for the optimizer inside; None where it is not asked for.
        masters: one per group, as long as this rank's.
        clip_grad: None where the checkpoint has none.
    """

    inner: StateDict | None
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
    *,
    states: bool = True,
) -> Loaded:
    """What this rank takes from the entries of all ranks that saved.

    Args:
        groups: as they are now.
        optimizer: the one inside.
        entries: in the order of ranks. As many as there are ranks now: each takes its own, and
            the others may be None. Otherwise all are joined and cut anew.
        states: the state of the optimizer inside is asked for, too.

    Raises:
        ValueError: something does not fit, here or on another rank.
    """
    return on_all_ranks(
        lambda: _checked(groups, optimizer, entries, states),
        [group.process_group for group in groups],
        groups[0].master.device,
    )


def _checked(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    entries: Sequence[StateDict],
    states: bool,
) -> Loaded:
    """The same, on this rank."""
    if not isinstance(entries, list | tuple) or not entries:
        raise ValueError(f"states should be a list with one entry per rank, but are not [{WHERE}]")
    worlds = [group.world for group in groups]
    if len(entries) == max(worlds):
        rank = max(group.rank for group in groups)
        entry = _checked_entry(entries[rank], rank)
        _check_count(entry, worlds, rank)
        _check_places(groups, entry)
    else:
        entry = _joined(groups, entries, states)
    # Only what belongs to no parameter may be missing.
    least = [group.partition_size - group.padding for group in groups]
    masters = [group.master for group in groups]
    fitting = matching_tensors(entry[MASTERS], masters, MASTERS, WHERE, least=least)
    inner = inner_state(optimizer, entry, INNER, WHERE) if states else None
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
    if "zero_stage" in entry:
        raise ValueError(f"state has zero_stage, as that of a ZeRO optimizer [{where}]")
    return dict(entry)


def _check_count(entry: StateDict, worlds: Sequence[int], rank: int) -> None:
    """Require the entry to be of as many ranks as its group has, where it says so."""
    count = entry.get("partition_count", list(worlds))
    if count != list(worlds):
        raise ValueError(
            f"partition_count={in_words(count)}, but should be {list(worlds)} "
            f"[entry {rank}, {WHERE}]"
        )


def _check_places(groups: Sequence[PartitionedGroup], entry: StateDict) -> None:
    """Require parameters that both sides name to lie where they lie here.

    Names may be others: a model that was renamed is the same model.
    """
    rows = entry.get("param_slice_mappings", [{} for _ in groups])
    if not isinstance(rows, list) or len(rows) != len(groups):
        raise ValueError(
            f"param_slice_mappings should be a list of {len(groups)}, but is not [{WHERE}]"
        )
    for group, row in zip(groups, rows, strict=True):
        for name in group.fragments.keys() & (row.keys() if isinstance(row, Mapping) else ()):
            place = row[name]
            at = place if isinstance(place, Mapping) else getattr(place, "__dict__", {})
            own = vars(group.fragments[name].in_partition)
            if {key: at.get(key) for key in own} != own:
                raise ValueError(f"{name} lies at {at}, but should lie at {own} [{WHERE}]")


def _joined(
    groups: Sequence[PartitionedGroup], entries: Sequence[object], states: bool
) -> StateDict:
    """One entry for this rank from those of another number of ranks."""
    if any(group.expert is not None for group in groups):
        raise ValueError(
            f"{len(entries)} entries were given, but should be {max(g.world for g in groups)}, one "
            f"per rank: partitions of experts cannot be cut anew [{WHERE}]"
        )
    checked_ones = [_checked_entry(each, number) for number, each in enumerate(entries)]
    for number, entry in enumerate(checked_ones):
        _check_count(entry, [len(entries)] * len(groups), number)
    first = checked_ones[0]
    rows = [_flats(entry[MASTERS], MASTERS) for entry in checked_ones]
    if any(len(row) != len(groups) for row in rows):
        got = [len(row) for row in rows]
        raise ValueError(f"{MASTERS} has {got} tensors, but should have {len(groups)} [{WHERE}]")
    joined = [_recut(group, [row[at] for row in rows]) for at, group in enumerate(groups)]
    if not states:
        return {**first, MASTERS: joined}
    inner = copy.deepcopy(parsed_inner_state(first, INNER, WHERE))
    held = [
        cast(Mapping[int, Mapping[str, object]], parsed_inner_state(entry, INNER, WHERE)["state"])
        for entry in checked_ones
    ]
    cut = cast(dict[int, dict[str, object]], inner["state"])
    for number, group in enumerate(groups):
        for key, parts in _parts(held, number).items():
            cut[number][key] = _recut(group, parts)
    return {**first, INNER: inner, MASTERS: joined}


def _flats(saved: object, name: str) -> list[Tensor]:
    """A list of 1-D tensors of fp32, whatever their lengths."""
    if isinstance(saved, list | tuple) and all(
        isinstance(t, Tensor) and t.dim() == 1 and t.dtype == torch.float32 for t in saved
    ):
        return list(saved)
    raise ValueError(f"{name} should be a list of 1-D tensors of fp32, but is not [{WHERE}]")


def _parts(
    held: Sequence[Mapping[int, Mapping[str, object]]], number: int
) -> dict[str, list[Tensor]]:
    """The states of one group that are split, by name, in the order of ranks."""
    rows = [state.get(number, {}) for state in held]
    if any(not isinstance(row, Mapping) or row.keys() != rows[0].keys() for row in rows):
        raise ValueError(
            f"entries have different states, but should have the same [group {number}, {WHERE}]"
        )
    split: dict[str, list[Tensor]] = {}
    for key, value in rows[0].items():
        column = [row[key] for row in rows]
        if isinstance(value, Tensor) and value.dim():
            split[key] = _flats(column, key)
        elif key == "step" and len({whole_steps(one, WHERE) for one in column}) > 1:
            raise ValueError(f"entries have steps {column}, but should agree [{WHERE}]")
    return split


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
