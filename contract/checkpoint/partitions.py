"""State dicts of `BF16Optimizer`: what one rank owns, and how entries of all ranks are joined.

    clip_grad                         largest norm
    base_optimizer_state              dict of the inner optimizer
    single_partition_of_fp32_groups   this rank's masters, padding included
    group_paddings, partition_count   by group
    partition_rank                    by group, the rank whose partition it is
    param_slice_mappings              by group and name, {"numel", "start"} in the master
    ds_version                        whose layout this is

Keys other than `partition_rank` are those of DeepSpeed's `BF16_Optimizer`; values are tensors and
plain values alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.agreement import on_all_ranks
from twinstep.contract.checkpoint.entries import (
    PARTITIONS,
    SAME,
    Loaded,
    clip_norm,
    copied,
    copy_of,
    matching_tensors,
    require_keys,
)
from twinstep.contract.checkpoint.inner import inner_state, parsed_inner_state
from twinstep.contract.errors import in_words
from twinstep.contract.fragments import Partition
from twinstep.contract.moments import StateDict, whole_steps
from twinstep.contract.parallel import Groups

INNER, RANK = "base_optimizer_state", "partition_rank"
# The layout of the dict is that of this version of DeepSpeed.
FORMAT = "0.19.8"
WHERE = "BF16Optimizer.load_state_dict"


def saved(
    groups: Sequence[Partition],
    optimizer: torch.optim.Optimizer,
    clip_grad: float,
    cpu_offload: bool,
) -> StateDict:
    """The entry of this rank; copies, not views, and with `cpu_offload` on the CPU."""
    return {
        "clip_grad": clip_grad,
        INNER: copied(optimizer.state_dict(), cpu_offload),
        PARTITIONS: [copy_of(group.master, cpu_offload) for group in groups],
        "group_paddings": [group.padding for group in groups],
        "partition_count": [group.world for group in groups],
        RANK: [group.rank for group in groups],
        "ds_version": FORMAT,
        "param_slice_mappings": [
            {name: vars(fragment.in_partition).copy() for name, fragment in group.fragments.items()}
            for group in groups
        ],
    }


def checked(
    groups: Sequence[Partition],
    optimizer: torch.optim.Optimizer,
    entries: Sequence[StateDict],
    ranks: Groups,
    *,
    states: bool = True,
) -> Loaded:
    """Contents that this rank takes from the entries of all ranks that saved.

    Args:
        groups: as they are now.
        optimizer: the inner one.
        entries: in the order of ranks. As many as there are ranks now: each takes its own, and
            the others may be None. Otherwise all are joined and cut anew.
        ranks: groups of all ranks that load.
        states: the state of the inner optimizer is asked for, too.

    Raises:
        ValueError: something does not fit, here or on another rank, or ranks would load states of
            different steps or clip norms.
    """
    return on_all_ranks(
        lambda: _checked(groups, optimizer, entries, states),
        ranks,
        groups[0].flat.device,
        same=SAME,
    )


def _checked(
    groups: Sequence[Partition],
    optimizer: torch.optim.Optimizer,
    entries: Sequence[StateDict],
    states: bool,
) -> Loaded:
    """The same, on this rank."""
    if not isinstance(entries, list | tuple) or not entries:
        raise ValueError(f"states should be a list with one entry per rank, but are not [{WHERE}]")
    worlds = [group.world for group in groups]
    # Entries are of the ranks of the largest group; of two, that of the shared parameters.
    rank = max(groups, key=lambda group: (group.world, group.expert is None)).rank
    if len(entries) == max(worlds):
        entry = _checked_entry(entries[rank], rank, worlds, [group.rank for group in groups])
        _check_places(groups, entry)
    else:
        entry = _joined(groups, entries, states)
    # Only what belongs to no parameter may be missing.
    least = [group.partition_size - group.padding for group in groups]
    own = [group.master for group in groups]
    return Loaded(
        masters=matching_tensors(entry[PARTITIONS], own, PARTITIONS, WHERE, least=least),
        inner=inner_state(optimizer, entry[INNER], WHERE, key=INNER) if states else None,
        clip_grad=clip_norm(entry, WHERE),
    )


def _checked_entry(
    given: object, rank: int, worlds: Sequence[int], ranks: Sequence[int]
) -> StateDict:
    """One entry: of as many ranks as its groups have, and of these ranks."""
    where = f"entry {rank}, {WHERE}"
    entry = dict(require_keys(given, ("ds_version", INNER, PARTITIONS), where))
    if not entry["ds_version"]:
        raise ValueError(f"ds_version is empty, but should name a version [{where}]")
    if "zero_stage" in entry:
        raise ValueError(f"state has a zero_stage, but only a ZeRO optimizer has one [{where}]")
    for key, wanted in (("partition_count", list(worlds)), (RANK, list(ranks))):
        found = entry.get(key, wanted)
        if found != wanted:
            raise ValueError(f"{key}={in_words(found)}, but should be {wanted} [{where}]")
    return entry


def _check_places(groups: Sequence[Partition], entry: StateDict) -> None:
    """Require parameters that both sides name to lie where they lie here.

    Names may be others: a model that was renamed is the same model.
    """
    rows = entry.get("param_slice_mappings", [{} for _ in groups])
    if not isinstance(rows, list) or len(rows) != len(groups):
        raise ValueError(
            f"param_slice_mappings should be a list of {len(groups)}, but is not [{WHERE}]"
        )
    for group, row in zip(groups, rows, strict=True):
        for name, place in row.items() if isinstance(row, Mapping) else ():
            if name not in group.fragments:
                continue
            own = vars(group.fragments[name].in_partition)
            held = place if isinstance(place, Mapping) else getattr(place, "__dict__", {})
            found = {key: held.get(key) for key in own}
            if found != own:
                raise ValueError(f"{name} lies at {found}, but should lie at {own} [{WHERE}]")


def _joined(groups: Sequence[Partition], entries: Sequence[object], states: bool) -> StateDict:
    """One entry for this rank from those of another number of ranks."""
    if any(group.expert is not None for group in groups):
        raise ValueError(
            f"{len(entries)} entries were given, but should be {max(g.world for g in groups)}, one "
            f"per rank: partitions of experts cannot be cut anew [{WHERE}]"
        )
    counts = [len(entries)] * len(groups)
    given = [
        _checked_entry(each, rank, counts, [rank] * len(groups))
        for rank, each in enumerate(entries)
    ]
    rows = [_vectors(entry[PARTITIONS], PARTITIONS) for entry in given]
    sizes = [len(row) for row in rows]
    if set(sizes) != {len(groups)}:
        raise ValueError(
            f"{PARTITIONS} has {sizes} tensors, but should have {len(groups)} [{WHERE}]"
        )
    parts = list(zip(*rows, strict=True))
    masters = [recut(group, own) for group, own in zip(groups, parts, strict=True)]
    whole = {**given[0], PARTITIONS: masters}
    if states:
        whole[INNER] = _joined_inner(groups, [entry[INNER] for entry in given])
    return whole


def _joined_inner(groups: Sequence[Partition], saved_ones: Sequence[object]) -> StateDict:
    """The dict of the inner optimizer, cut from those of all ranks."""
    inners = [parsed_inner_state(one, WHERE, INNER) for one in saved_ones]
    tables = [cast(Mapping[int, object], inner["state"]) for inner in inners]
    if any(table.keys() != tables[0].keys() for table in tables):
        raise ValueError(f"entries have states of different groups, but should agree [{WHERE}]")
    joined = {
        number: _joined_state(group, [table[number] for table in tables], number)
        for number, group in enumerate(groups)
        if number in tables[0]
    }
    return {**inners[0], "state": {**tables[0], **joined}}


def _joined_state(group: Partition, held: Sequence[object], number: int) -> StateDict:
    """The state of one group, cut from that of all ranks."""
    rows = [row for row in held if isinstance(row, Mapping)]
    if len(rows) != len(held) or any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError(
            f"entries have different states, but should have the same [group {number}, {WHERE}]"
        )
    joined: StateDict = dict(rows[0])
    if "step" in joined:
        steps = [whole_steps(row["step"], WHERE) for row in rows]
        if len(set(steps)) > 1:
            raise ValueError(f"entries have steps {steps}, but should agree [{WHERE}]")
    for key, value in rows[0].items():
        if isinstance(value, Tensor) and value.dim():
            joined[key] = recut(group, _vectors([row[key] for row in rows], key))
    return joined


def _vectors(found: object, name: str) -> list[Tensor]:
    """A list of 1-D tensors of fp32, whatever their lengths."""
    if isinstance(found, list | tuple) and all(
        isinstance(t, Tensor) and t.dim() == 1 and t.dtype == torch.float32 for t in found
    ):
        return list(found)
    raise ValueError(f"{name} should be a list of 1-D tensors of fp32, but is not [{WHERE}]")


def recut(group: Partition, parts: Sequence[Tensor]) -> Tensor:
    """This rank's partition of a tensor that lies in parts, whatever padding they end in.

    Raises:
        ValueError: the parts have fewer elements than the parameters of the group.
    """
    whole = torch.cat([part.detach() for part in parts])
    if whole.numel() < group.numel:
        raise ValueError(
            f"partitions have {whole.numel()} elements together, but should have at least "
            f"{group.numel} [{WHERE}]"
        )
    size = group.partition_size
    ends = whole.new_zeros(size * group.world - group.numel)
    padded = torch.cat([whole.narrow(0, 0, group.numel), ends])
    return padded.narrow(0, group.rank * size, size).clone()
