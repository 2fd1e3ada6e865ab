"""Groups whose master weights are split over ranks: layout, accumulators, and fragments by name.

    flat         all parameters of the group end to end, padded with zeros to a multiple of 2 W
    partition r  elements [r P, (r+1) P) of it, P = padded / W (`reference.partition`)
    master       fp32, the partition of this rank
    accumulator  as long as flat, on every rank; the sum of gradients since the last step

W is the number of ranks that share the group, r this rank's place among them. Everything is counted
in elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from twinstep.contract.fragments import Fragment, fragments_of
from twinstep.contract.tensors import check_param, dtype_names
from twinstep.reference.accumulate import accumulate
from twinstep.reference.arithmetic import fp32
from twinstep.reference.partition import padded_numel, padding, partition_bounds


@dataclass(eq=False, kw_only=True)
class PartitionedGroup:
    """One parameter group.

    Attributes:
        params: what is trained, in order.
        names: of the parameters.
        process_group: over which the group is split; None for one rank.
        rank: r.
        world: W.
        flat: the model weights; the parameters are views into it.
        master: leaf, fp32, of length P.
        accumulator: in the accumulation dtype, as long as flat.
        has_gradient: whether a parameter was accumulated since the last step.
        fragments: by name, those that lie in this rank's partition.
        expert: name of the expert group, or None.
    """

    params: list[Tensor]
    names: list[str]
    process_group: dist.ProcessGroup | None
    rank: int
    world: int
    flat: Tensor
    master: Tensor
    accumulator: Tensor
    has_gradient: list[bool] = field(default_factory=list)
    fragments: Mapping[str, Fragment] = field(default_factory=dict)
    expert: str | None = None

    @property
    def partition_size(self) -> int:
        """P."""
        return self.master.numel()

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(param.numel() for param in self.params)

    @property
    def padding(self) -> int:
        """Elements of this rank's partition that belong to no parameter."""
        return padding(self.numel, self.world, self.rank)

    def own(self, flat: Tensor) -> Tensor:
        """This rank's partition of a tensor laid out like `flat`: a view."""
        start = self.rank * self.partition_size
        return flat[start : start + self.partition_size]

    def gradients(self) -> list[Tensor]:
        """The accumulator cut into parameters: 1-D views, in order."""
        return [_part(self, index) for index in range(len(self.params))]

    def partitions(self, flat: Tensor) -> list[Tensor]:
        """All ranks' partitions of a tensor laid out like `flat`: views."""
        size = self.partition_size
        return [flat[rank * size : (rank + 1) * size] for rank in range(self.world)]


def partitioned_group(
    params: Sequence[Tensor],
    param_names: Mapping[Tensor, str],
    process_group: dist.ProcessGroup | None,
    grad_acc_dtype: torch.dtype,
    where: str,
    *,
    expert: str | None = None,
) -> PartitionedGroup:
    """Lay out a group; the parameters become views of a new flat buffer and keep their values.

    Args:
        params: of one dtype; frozen ones are left out and left alone.
        param_names: a name for every trained parameter.
        process_group: ranks that share the group, or None.
        grad_acc_dtype: of the accumulator.
        where: the class and the group, for messages.
        expert: name of the expert group, or None.

    Raises:
        ValueError: dtypes are mixed or unknown, or a parameter has no name.
    """
    trained = [param for param in params if param.requires_grad]
    for index, param in enumerate(trained):
        check_param(param, f"parameter {index}, {where}")
        if param not in param_names:
            raise ValueError(f"param_names has no name for parameter {index} [{where}]")
    dtypes = list(dict.fromkeys(param.dtype for param in trained)) or [torch.bfloat16]
    if len(dtypes) > 1:
        mixed = dtype_names(dtypes, "and")
        raise ValueError(f"parameters are {mixed}, but should have one dtype per group [{where}]")
    world = 1 if process_group is None else dist.get_world_size(process_group)
    rank = 0 if process_group is None else dist.get_rank(process_group)
    names = [param_names[param] for param in trained]
    sizes = [(name, param.numel()) for name, param in zip(names, trained, strict=True)]
    numel = sum(size for _, size in sizes)
    flat = _padded(trained, dtypes[0], padded_numel(numel, world))
    start, stop = partition_bounds(numel, world, rank)
    master = fp32(flat[start:stop]).clone().requires_grad_()
    return PartitionedGroup(
        params=trained,
        names=names,
        process_group=process_group,
        rank=rank,
        world=world,
        flat=flat,
        master=master,
        accumulator=torch.zeros(flat.numel(), dtype=grad_acc_dtype),
        has_gradient=[False] * len(trained),
        fragments=fragments_of(sizes, range(start, stop)),
        expert=expert,
    )


def _padded(params: Sequence[Tensor], dtype: torch.dtype, length: int) -> Tensor:
    """Move the parameters into one buffer, which ends in zeros."""
    flat = torch.zeros(length, dtype=dtype)
    start = 0
    for param in params:
        place = flat[start : start + param.numel()].view(param.shape)
        place.copy_(param.detach())
        param.data = place
        start += param.numel()
    return flat


def _part(group: PartitionedGroup, index: int) -> Tensor:
    """One parameter's part of the accumulator: a 1-D view."""
    start = sum(param.numel() for param in group.params[:index])
    return group.accumulator[start : start + group.params[index].numel()]


def accumulate_gradient(group: PartitionedGroup, index: int) -> None:
    """Add a parameter's own gradient, if it has one, to the accumulator."""
    grad = group.params[index].grad
    if grad is None:
        return
    view = _part(group, index)
    (total,) = accumulate([view], [grad.detach().reshape(-1)])
    view.copy_(total)
    group.has_gradient[index] = True


def immediate_hooks(groups: Sequence[PartitionedGroup]) -> list[RemovableHandle]:
    """Accumulate each gradient when backward has it, and drop it: it cannot count twice."""

    def hook(held: weakref.ref[PartitionedGroup], index: int) -> Callable[[Tensor], None]:
        def run(param: Tensor) -> None:
            group = held()
            if group is not None:
                with torch.no_grad():
                    accumulate_gradient(group, index)
                param.grad = None

        return run

    return [
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            hook(weakref.ref(group), index)
        )
        for group in groups  # the garbage collector does not see what hooks hold
        for index, param in enumerate(group.params)
    ]


def copy_masters_to_model(group: PartitionedGroup) -> None:
    """Write the master of this rank into its part of the model weights, rounded once."""
    group.own(group.flat).copy_(group.master.detach())


def gather(group: PartitionedGroup, bucket: int) -> None:
    """Bring the model weights of all ranks together.

    Partitions are gathered as a list: nothing depends on their lying side by side in memory.

    Args:
        group: its flat buffer is written.
        bucket: largest number of elements that one message brings together.
    """
    if group.world == 1 or group.process_group is None:
        return
    piece = max(bucket // group.world, 1)
    partitions = group.partitions(group.flat)
    for start in range(0, group.partition_size, piece):
        views = [partition[start : start + piece] for partition in partitions]
        gathered = [torch.empty_like(view) for view in views]
        dist.all_gather(gathered, views[group.rank].clone(), group=group.process_group)
        for view, received in zip(views, gathered, strict=True):
            view.copy_(received)


def copy_model_to_masters(group: PartitionedGroup) -> None:
    """Write the model weights into the master of this rank."""
    group.master.detach().copy_(group.own(group.flat))
