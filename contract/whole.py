"""Whole tensors of parameters whose masters are split over ranks, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.fragments import Partition


class WholeTensors:
    """Reads and writes weights, states and gradients by the names of parameters.

    Args:
        groups: as laid out.
    """

    def __init__(self, groups: Sequence[Partition]) -> None:
        self._groups = groups
        self._homes = {
            name: (group, index) for group in groups for index, name in enumerate(group.names)
        }

    def read(self, optimizer: torch.optim.Optimizer, name: str, key: str | None) -> Tensor:
        """The fp32 weight (key None) or one of its states; a new tensor, shaped like the parameter.

        A collective: every rank adds the part that it owns to zeros.

        Raises:
            ValueError: there is no such parameter, or no such state yet; on every rank alike.
        """
        group, index = self._home(name)
        return whole(group, index, _source(group, optimizer, name, key))

    def partitioned(self, name: str, sources: Sequence[Tensor]) -> Tensor:
        """The elements of a parameter, given this rank's partition of each group; a new tensor.

        A collective, as `read`; raises as it does.
        """
        group, index = self._home(name)
        return whole(group, index, sources[self._groups.index(group)])

    def write(
        self, optimizer: torch.optim.Optimizer, name: str, value: Tensor, key: str | None
    ) -> None:
        """Write this rank's part of a whole weight or state; local, and nothing is published.

        Raises:
            ValueError: there is no such parameter or state, or the shape is another.
        """
        group, index = self._home(name)
        shape = group.params[index].shape
        if value.shape != shape:
            raise ValueError(
                f"value has shape {tuple(value.shape)}, but should have {tuple(shape)} [{name}]"
            )
        target = _source(group, optimizer, name, key)
        if name in group.fragments:
            at, own = group.fragments[name].in_param, group.fragments[name].in_partition
            part = value.detach().reshape(-1).narrow(0, at.start, at.numel)
            target.narrow(0, own.start, own.numel).copy_(part)

    def gradient(self, name: str) -> Tensor:
        """A copy of the accumulated gradient, shaped like the parameter.

        Accumulators are whole on every rank, so that nothing is gathered.
        """
        group, index = self._home(name)
        return group.gradients()[index].clone().view(group.params[index].shape)

    def _home(self, name: str) -> tuple[Partition, int]:
        if name not in self._homes:
            raise ValueError(
                f"there is no parameter {name}, but there are {', '.join(self._homes)}"
            )
        return self._homes[name]


def whole(group: Partition, index: int, source: Tensor) -> Tensor:
    """A parameter's elements of a tensor that lies in partitions; fp32, shaped like the parameter.

    A collective: every rank adds the part that it owns to zeros.

    Args:
        group: of the parameter.
        index: of the parameter, in the order in which they lie.
        source: this rank's partition.
    """
    param, name = group.params[index], group.names[index]
    flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    if name in group.fragments:
        at, own = group.fragments[name].in_param, group.fragments[name].in_partition
        flat.narrow(0, at.start, at.numel).copy_(source.narrow(0, own.start, own.numel))
    if group.process_group is not None:
        dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group.process_group)
    return flat.view(param.shape)


def _source(
    group: Partition, optimizer: torch.optim.Optimizer, name: str, key: str | None
) -> Tensor:
    if key is None:
        return group.master.detach()
    held = optimizer.state.get(group.master, {})
    shape = group.master.shape
    like_master = {k: v for k, v in held.items() if isinstance(v, Tensor) and v.shape == shape}
    if key not in like_master:
        known = ", ".join(like_master) or "none before a first step"
        raise ValueError(f"{name} has no state {key}, but has {known}")
    return like_master[key]
