"""Whole tensors of parameters whose masters are split over ranks, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.reference.optimizers.collectives import summed
from twinstep.reference.optimizers.partitioned_groups import PartitionedGroup


def gathered(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    name: str,
    key: str | None,
) -> Tensor:
    """The fp32 weight of a parameter (key None) or one of its states, shaped like it.

    A collective: every rank adds the part that it owns to zeros.

    Raises:
        ValueError: there is no such parameter, or no such state yet; on every rank alike.
    """
    group, param = _found(groups, name)
    flat = torch.zeros(param.numel())
    source = _source(group, optimizer, name, key)
    if name in group.fragments:
        fragment = group.fragments[name]
        own, there = fragment.in_partition, fragment.in_param
        flat[there.start : there.start + there.numel] = source[own.start : own.start + own.numel]
    return summed(flat, [] if group.process_group is None else [group.process_group]).view(
        param.shape
    )


def scatter(
    groups: Sequence[PartitionedGroup],
    optimizer: torch.optim.Optimizer,
    name: str,
    value: Tensor,
    key: str | None,
) -> None:
    """Write this rank's part of a whole weight or state; local, no communication.

    Raises:
        ValueError: there is no such parameter or state, or the shape is another.
    """
    group, param = _found(groups, name)
    if value.shape != param.shape:
        raise ValueError(
            f"value has shape {tuple(value.shape)}, but should have {tuple(param.shape)} [{name}]"
        )
    target = _source(group, optimizer, name, key)
    if name in group.fragments:
        fragment = group.fragments[name]
        own, there = fragment.in_partition, fragment.in_param
        part = value.reshape(-1)[there.start : there.start + there.numel]
        target[own.start : own.start + own.numel] = part


def gradient(groups: Sequence[PartitionedGroup], name: str) -> Tensor:
    """The accumulated gradient of a parameter, shaped like it; a copy.

    Accumulators are whole on every rank, so that nothing is gathered.

    Raises:
        ValueError: there is no such parameter.
    """
    group, param = _found(groups, name)
    return group.gradients()[group.names.index(name)].clone().view(param.shape)


def _found(groups: Sequence[PartitionedGroup], name: str) -> tuple[PartitionedGroup, Tensor]:
    for group in groups:
        if name in group.names:
            return group, group.params[group.names.index(name)]
    names = ", ".join(name for group in groups for name in group.names)
    raise ValueError(f"there is no parameter {name}, but there are {names}")


def _source(
    group: PartitionedGroup, optimizer: torch.optim.Optimizer, name: str, key: str | None
) -> Tensor:
    """The master, or the state of that key."""
    if key is None:
        return group.master.detach()
    state = optimizer.state.get(group.master, {})
    value = state.get(key)
    if not isinstance(value, Tensor) or value.shape != group.master.shape:
        known = [k for k, v in state.items() if isinstance(v, Tensor) and v.dim()]
        raise ValueError(
            f"{name} has no state {key}, but has {', '.join(known) or 'none before a first step'}"
        )
    return value
