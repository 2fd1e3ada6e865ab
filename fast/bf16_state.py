"""State dicts of `BF16Optimizer`: what one rank owns, and how entries of all ranks are joined.

    clip_grad                         largest norm
    base_optimizer_state              dict of the optimizer inside
    single_partition_of_fp32_groups   this rank's masters, padding included
    group_paddings, partition_count   by group
    param_slice_mappings              by group and name, {"numel", "start"} in the master
    ds_version                        whose layout this is

The keys are those of DeepSpeed's `BF16_Optimizer`; values are tensors and plain values alone.
Everything is checked before anything changes.
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
from twinstep.fast.bf16_groups import PartitionedGroup
from twinstep.fast.fitting import require_dict_of_optimizer, state_inside
from twinstep.fast.saved import clip_of, require_entries, tensors_like

MASTERS = "single_partition_of_fp32_groups"
INNER = "base_optimizer_state"
FORMAT = "0.19.8"
WHERE = "BF16Optimizer.load_state_dict"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a rank takes from a checkpoint; everything fits.

    Attributes:
        inner: dict for the optimizer inside, or None where it is not asked for.
        masters: one per group, as long as this rank's.
        clip_grad: None where the checkpoint has none.
    """

    inner: StateDict | None
    masters: list[Tensor]
    clip_grad: float | None


def entry_of(
    groups: Sequence[PartitionedGroup], inside: torch.optim.Optimizer, clip_grad: float
) -> StateDict:
    """The entry of this rank; copies, not views."""
    places = [
        {name: (at.in_partition.numel, at.in_partition.start) for name, at in g.fragments.items()}
        for g in groups
    ]
    return {
        "clip_grad": clip_grad,
        INNER: copy.deepcopy(inside.state_dict()),
        MASTERS: [group.master.detach().clone() for group in groups],
        "group_paddings": [group.padding for group in groups],
        "partition_count": [group.world for group in groups],
        "ds_version": FORMAT,
        "param_slice_mappings": [
            {name: {"numel": numel, "start": start} for name, (numel, start) in row.items()}
            for row in places
        ],
    }


def checked(
    groups: Sequence[PartitionedGroup],
    inside: torch.optim.Optimizer,
    entries: Sequence[StateDict],
    *,
    states: bool = True,
) -> Loaded:
    """What this rank takes from the entries of all ranks that saved.

    Args:
        groups: as they are now.
        inside: the optimizer inside.
        entries: in the order of ranks. As many as there are ranks now: each takes its own, and
            the others may be None. Otherwise all are joined and cut anew.
        states: the state of the optimizer inside is asked for, too.

    Raises:
        ValueError: something does not fit, here or on another rank.
    """
    return on_all_ranks(
        lambda: _own(groups, inside, entries, states),
        [group.process_group for group in groups],
        groups[0].master.device,
    )


def _own(
    groups: Sequence[PartitionedGroup],
    inside: torch.optim.Optimizer,
    entries: Sequence[StateDict],
    states: bool,
) -> Loaded:
    if not (isinstance(entries, list | tuple) and len(entries)):
        raise ValueError(f"states should be a list with one entry per rank, but are not [{WHERE}]")
    worlds = [group.world for group in groups]
    if len(entries) == max(worlds):
        rank = max(group.rank for group in groups)
        entry = _require_entry(entries[rank], rank, worlds)
        _require_places(groups, entry)
    else:
        entry = _joined(groups, entries, states)
    inner = state_inside(inside, entry[INNER], WHERE, key=INNER) if states else None
    clip = clip_of(entry, 0.0, WHERE) if "clip_grad" in entry else None
    return Loaded(inner=inner, masters=_fitting_masters(groups, entry[MASTERS]), clip_grad=clip)


def _require_entry(given: object, rank: int, worlds: Sequence[int]) -> StateDict:
    where = f"entry {rank}, {WHERE}"
    entry = dict(require_entries(given, ("ds_version", INNER, MASTERS), where))
    if not entry["ds_version"]:
        raise ValueError(f"ds_version is empty, but should name a version [{where}]")
    if "zero_stage" in entry:
        raise ValueError(f"state has a zero_stage, but only a ZeRO optimizer has one [{where}]")
    count = entry.get("partition_count")
    if "partition_count" in entry and count != list(worlds):
        raise ValueError(
            f"partition_count={in_words(count)}, but should be {list(worlds)} [{where}]"
        )
    return entry


def _require_places(groups: Sequence[PartitionedGroup], entry: StateDict) -> None:
    """Require parameters to lie where they lie here; those of other names may be renamed ones."""
    rows = entry.get("param_slice_mappings")
    if rows is None:
        return
    if not (isinstance(rows, list) and len(rows) == len(groups)):
        raise ValueError(
            f"param_slice_mappings should be a list of {len(groups)}, but is not [{WHERE}]"
        )
    for group, row in zip(groups, rows, strict=True):
        for name, place in row.items() if isinstance(row, Mapping) else ():
            if name not in group.fragments:
                continue
            at = group.fragments[name].in_partition
            saved = place if isinstance(place, Mapping) else getattr(place, "__dict__", {})
            found = (saved.get("start"), saved.get("numel"))
            if found != (at.start, at.numel):
                raise ValueError(
                    f"{name} has start and numel {found}, but should have {(at.start, at.numel)} "
                    f"[{WHERE}]"
                )


def _fitting_masters(groups: Sequence[PartitionedGroup], saved: object) -> list[Tensor]:
    """Saved masters, extended with zeros where they have less padding."""
    masters = [group.master for group in groups]
    if not isinstance(saved, list | tuple) or len(saved) != len(groups):
        return tensors_like(saved, masters, MASTERS, WHERE)
    extended = list(saved)
    for index, (given, group) in enumerate(zip(saved, groups, strict=True)):
        if isinstance(given, Tensor) and given.dim() == 1 and not given.is_sparse:
            short = group.partition_size - given.numel()
            # No element of a parameter may be missing.
            if 0 < short <= group.padding:
                extended[index] = torch.cat([given.detach(), given.new_zeros(short)])
    return tensors_like(extended, masters, MASTERS, WHERE)


def _joined(
    groups: Sequence[PartitionedGroup], entries: Sequence[object], states: bool
) -> StateDict:
    """One entry for this rank, cut from those of another number of ranks."""
    if any(group.expert is not None for group in groups):
        wanted = max(group.world for group in groups)
        raise ValueError(
            f"states are of {len(entries)} ranks, but should be of {wanted}: experts are not cut "
            f"anew [{WHERE}]"
        )
    counts = [len(entries)] * len(groups)
    given = [_require_entry(each, rank, counts) for rank, each in enumerate(entries)]
    rows = [_vectors(entry[MASTERS], MASTERS) for entry in given]
    numbers = [len(row) for row in rows]
    if set(numbers) != {len(groups)}:
        raise ValueError(
            f"{MASTERS} has {numbers} tensors, but should have {len(groups)} [{WHERE}]"
        )
    whole = {**given[0], MASTERS: [_cut(g, parts) for g, *parts in zip(groups, *rows, strict=True)]}
    if states:
        inners = [require_dict_of_optimizer(entry[INNER], WHERE, INNER) for entry in given]
        tables = [cast(Mapping[int, object], inner["state"]) for inner in inners]
        state = {
            number: _joined_state(group, [table[number] for table in tables])
            for number, group in enumerate(groups)
            if all(number in table for table in tables)
        }
        if {number for table in tables for number in table} != set(state):
            raise ValueError(f"states of ranks are of different groups [{WHERE}]")
        whole[INNER] = {**inners[0], "state": state}
    return whole


def _joined_state(group: PartitionedGroup, held: Sequence[object]) -> StateDict:
    """The state of one group, cut from that of all ranks."""
    rows = [dict(row) if isinstance(row, Mapping) else {} for row in held]
    if any(set(row) != set(rows[0]) for row in rows):
        raise ValueError(f"ranks have different states, but should have the same [{WHERE}]")
    if "step" in rows[0]:
        steps = [whole_steps(row["step"], WHERE) for row in rows]
        if len(set(steps)) > 1:
            raise ValueError(f"ranks have steps {steps}, but should agree [{WHERE}]")
    joined: StateDict = dict(rows[0])
    for key, value in joined.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            joined[key] = _cut(group, _vectors([row[key] for row in rows], key))
    return joined


def _vectors(saved: object, name: str) -> list[Tensor]:
    """Tensors of one dimension in fp32."""
    found = saved if isinstance(saved, list | tuple) else [None]
    vectors = [one for one in found if isinstance(one, Tensor) and one.dim() == 1]
    if len(vectors) != len(found) or any(one.dtype != torch.float32 for one in vectors):
        raise ValueError(f"{name} should be 1-D tensors of fp32, but are not [{WHERE}]")
    return vectors


def _cut(group: PartitionedGroup, pieces: Sequence[Tensor]) -> Tensor:
    """This rank's partition of what lies in pieces, whatever padding they end in."""
    together = torch.cat([piece.detach().reshape(-1) for piece in pieces])
    missing = group.numel - together.numel()
    if missing > 0:
        raise ValueError(
            f"partitions have {together.numel()} elements together, but should have at least "
            f"{group.numel} [{WHERE}]"
        )
    ends = together.new_zeros(group.flat.numel() - group.numel)
    return group.own(torch.cat([together[: group.numel], ends])).clone()
