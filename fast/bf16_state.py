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
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from fast.bf16_groups import PartitionedGroup
from fast.fused_adam import FusedAdam
from fast.moments import MOMENTS, StateDict

MASTERS = "single_partition_of_fp32_groups"
INNER = "base_optimizer_state"
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


def entry_of(groups: Sequence[PartitionedGroup], inside: FusedAdam, clip_grad: float) -> StateDict:
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
    groups: Sequence[PartitionedGroup], inside: FusedAdam, entries: Sequence[StateDict]
) -> Loaded:
    """What this rank takes from the entries of all ranks that saved.

    Args:
        groups: as they are now.
        inside: the optimizer inside.
        entries: in the order of ranks. As many as there are ranks now: each takes its own, and
            the others may be None. Otherwise all are joined and cut anew.

    Raises:
        ValueError: something does not fit.
    """
    if not (isinstance(entries, list | tuple) and len(entries)):
        raise ValueError(f"states should be a list with one entry per rank, but are not [{WHERE}]")
    worlds = {group.world for group in groups}
    if worlds == {len(entries)}:
        rank = max(group.rank for group in groups)
        entry = _require_entry(entries[rank], rank)
    else:
        entry = _joined(groups, [_require_entry(each, n) for n, each in enumerate(entries)])
    return Loaded(
        inner=fitting_inner(inside, _inner_of(entry)),
        masters=_fitting_masters(groups, entry[MASTERS]),
        clip_grad=_clip_of(entry),
    )


def _require_entry(entry: object, rank: int) -> StateDict:
    if not isinstance(entry, Mapping):
        kind = type(entry).__name__
        raise ValueError(f"state is a {kind}, but should be a dict [entry {rank}, {WHERE}]")
    missing = [key for key in ("ds_version", INNER, MASTERS) if key not in entry]
    if missing:
        raise ValueError(f"state lacks {', '.join(missing)} [entry {rank}, {WHERE}]")
    if not entry["ds_version"]:
        raise ValueError(f"ds_version is empty, but should name a version [entry {rank}, {WHERE}]")
    return dict(entry)


def _inner_of(entry: StateDict) -> StateDict:
    inner = entry[INNER]
    if isinstance(inner, dict) and isinstance(inner.get("state"), dict):
        groups = inner.get("param_groups")
        if isinstance(groups, list) and all(isinstance(g, dict) and "params" in g for g in groups):
            return cast(StateDict, inner)
    raise ValueError(f"{INNER} should be the state dict of an optimizer, but is not [{WHERE}]")


def _clip_of(entry: StateDict) -> float | None:
    value = entry.get("clip_grad")
    if "clip_grad" not in entry:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"clip_grad={value!r}, but should be a number [{WHERE}]")
    return float(value)


def _fitting_masters(groups: Sequence[PartitionedGroup], saved: object) -> list[Tensor]:
    """Saved masters, extended with zeros where they have less padding."""
    if not isinstance(saved, list | tuple) or not all(isinstance(t, Tensor) for t in saved):
        raise ValueError(f"{MASTERS} should be a list of tensors, but is not [{WHERE}]")
    if len(saved) != len(groups):
        raise ValueError(
            f"{MASTERS} has {len(saved)} tensors, but should have {len(groups)} [{WHERE}]"
        )
    fitting = []
    for index, (given, group) in enumerate(zip(saved, groups, strict=True)):
        numel, wanted = given.numel(), group.partition_size
        if not given.is_floating_point():
            raise ValueError(
                f"{MASTERS}[{index}] is {given.dtype}, but should be floating-point [{WHERE}]"
            )
        if numel > wanted or (numel < wanted and given.dim() != 1):
            raise ValueError(
                f"{MASTERS}[{index}] has {numel} elements, but should have {wanted} [{WHERE}]"
            )
        fitting.append(torch.cat([given.detach().reshape(-1), given.new_zeros(wanted - numel)]))
    return fitting


def fitting_inner(inside: FusedAdam, saved: StateDict) -> StateDict:
    """The dict for the optimizer inside; options that its groups lack stay as they are now.

    Raises:
        ValueError: groups, or the state of some master, do not fit.
    """
    given = cast(Sequence[dict[str, object]], saved["param_groups"])
    sizes = [len(cast(Sequence[int], group["params"])) for group in given]
    own = inside.state_dict()["param_groups"]
    wanted = [len(group["params"]) for group in own]
    if sizes != wanted:
        raise ValueError(
            f"state has groups of {sizes} parameters, but should have {wanted} [{WHERE}]"
        )
    numbers = chain.from_iterable(cast(Sequence[int], group["params"]) for group in given)
    masters = chain.from_iterable(group["params"] for group in inside.param_groups)
    states = cast(Mapping[int, Mapping[str, object]], saved["state"])
    for number, master in zip(numbers, masters, strict=True):
        if states.get(number):
            _require_state(states[number], master, number)
    groups = [{**mine, **theirs} for mine, theirs in zip(own, given, strict=True)]
    return {**saved, "param_groups": groups}


def _require_state(state: Mapping[str, object], master: Tensor, number: int) -> None:
    lacking = [name for name in ("step", *MOMENTS) if name not in state]
    if lacking:
        raise ValueError(f"state of parameter {number} lacks {', '.join(lacking)} [{WHERE}]")
    step = float(cast(float, state["step"]))
    if step < 0.0 or not step.is_integer():
        raise ValueError(
            f"step={step}, but should be a whole number of steps [parameter {number}, {WHERE}]"
        )
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != master.shape:
            raise ValueError(
                f"{key} of parameter {number} has shape {tuple(value.shape)}, but should have "
                f"{tuple(master.shape)} [{WHERE}]"
            )


def _joined(groups: Sequence[PartitionedGroup], entries: Sequence[StateDict]) -> StateDict:
    """One entry for this rank, cut from those of another number of ranks."""
    rows = [cast(Sequence[Tensor], entry[MASTERS]) for entry in entries]
    counts = [len(row) for row in rows]
    if set(counts) != {len(groups)}:
        raise ValueError(f"{MASTERS} has {counts} tensors, but should have {len(groups)} [{WHERE}]")
    inners = [_inner_of(entry) for entry in entries]
    state: dict[object, dict[str, object]] = {}
    for number, held in cast(Mapping[int, Mapping[str, object]], inners[0]["state"]).items():
        state[number] = dict(held)
        for key in (k for k, v in held.items() if isinstance(v, Tensor) and v.dim()):
            pieces = [cast(dict[int, dict[str, Tensor]], i["state"])[number][key] for i in inners]
            state[number][key] = _cut(groups[number], pieces)
    masters = [_cut(group, pieces) for group, *pieces in zip(groups, *rows, strict=True)]
    return {**entries[0], INNER: {**inners[0], "state": state}, MASTERS: masters}


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
