"""A parameter group split over ranks: layout, accumulators, and fragments by name.

    flat         all parameters of the group end to end, padded with zeros to a multiple of 2 W
    partition r  elements [r P, (r+1) P) of it, P = padded / W
    master       fp32, the partition of this rank
    accumulator  as long as flat, on every rank; the sum of gradients since the last step

W ranks share the group; this rank is number r among them. Everything is counted in elements.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from twinstep.contract.fragments import Fragment, fragments_of
from twinstep.contract.shards import waited
from twinstep.contract.tensors import FLOATS, check_param, dtype_names
from twinstep.fast.kernels.accumulate import accumulate_, accumulate_lists
from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.runtime.lists import FixedTensors, Layout, MovingTensors
from twinstep.fast.runtime.tables import TableCache

UNIT = 2  # elements for each rank that the padded length is a multiple of


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
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [param.numel() for param in self.params]

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(self.sizes)

    @property
    def padding(self) -> int:
        """Elements of this rank's partition that belong to no parameter."""
        size = self.partition_size
        return sorted((0, (self.rank + 1) * size - self.numel, size))[1]

    def own(self, flat: Tensor) -> Tensor:
        """This rank's partition of a tensor laid out like `flat`: a view."""
        return flat.narrow(0, self.rank * self.partition_size, self.partition_size)

    def gradients(self) -> list[Tensor]:
        """The accumulator cut into parameters: 1-D views, in order."""
        return list(torch.split(self.accumulator[: self.numel], self.sizes)) if self.params else []

    def accumulated(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that have a gradient since the last step, each with its part."""
        rows = zip(self.params, self.gradients(), self.has_gradient, strict=True)
        return [(param, grad) for param, grad, has in rows if has]

    def lists(self, moments: Sequence[Tensor]) -> list[list[Tensor]]:
        """Master, accumulator, moments and model weights of this rank, each in a list of one."""
        row = [self.master.detach(), self.own(self.accumulator), *moments, self.own(self.flat)]
        return [[tensor] for tensor in row]

    def runs(self, chosen: Sequence[bool]) -> list[Tensor]:
        """Views of the accumulator that together hold the chosen parameters, as few as can be."""
        bounds: list[list[int]] = []
        end = 0
        for size, wanted in zip(self.sizes, chosen, strict=True):
            begin, end = end, end + size
            if wanted and bounds and bounds[-1][1] == begin:
                bounds[-1][1] = end
            elif wanted and size:
                bounds.append([begin, end])
        return [self.accumulator[begin:stop] for begin, stop in bounds]


def partitioned_group(
    params: Sequence[Tensor],
    param_names: Mapping[Tensor, str],
    process_group: dist.ProcessGroup | None,
    accumulation: torch.dtype,
    device: torch.device,
    where: str,
    *,
    expert: str | None,
    accumulates: bool = True,
) -> PartitionedGroup:
    """Lay out a group; the parameters become views of a new flat buffer and keep their values.

    Args:
        params: of one dtype; frozen ones are left out and left alone.
        param_names: a name for every trained parameter.
        process_group: ranks that share the group, or None.
        accumulation: dtype of the accumulator.
        device: of all parameters.
        where: the class and the group, for messages.
        expert: name of the expert group, or None.
        accumulates: False makes an accumulator without elements, for whoever needs none yet.

    Raises:
        ValueError: dtypes are mixed or unknown, a parameter is elsewhere or has no name.
    """
    trained = [param for param in params if param.requires_grad]
    for index, param in enumerate(trained):
        _require_here(param, device, f"parameter {index}, {where}")
        if param not in param_names:
            raise ValueError(f"param_names has no name for parameter {index} [{where}]")
    dtype = _only_dtype(trained, where)
    world = dist.get_world_size(process_group) if process_group is not None else 1
    rank = dist.get_rank(process_group) if process_group is not None else 0
    flat = _moved(trained, dtype, device, UNIT * world)
    size = flat.numel() // world
    names = [param_names[param] for param in trained]
    sizes = [(name, param.numel()) for name, param in zip(names, trained, strict=True)]
    own = range(rank * size, (rank + 1) * size)
    return PartitionedGroup(
        params=trained,
        names=names,
        process_group=process_group,
        rank=rank,
        world=world,
        flat=flat,
        master=flat[own.start : own.stop].to(torch.float32, copy=True).requires_grad_(),
        accumulator=torch.zeros_like(flat if accumulates else flat[:0], dtype=accumulation),
        has_gradient=[False] * len(trained),
        fragments=fragments_of(sizes, own),
        expert=expert,
    )


def _require_here(param: Tensor, device: torch.device, where: str) -> None:
    check_param(param, where)
    if param.device != device:
        raise ValueError(
            f"parameter is on {param.device}, but should be on {device} like the first [{where}]"
        )


def _only_dtype(params: Sequence[Tensor], where: str) -> torch.dtype:
    found = tuple(dict.fromkeys(param.dtype for param in params)) or (torch.bfloat16,)
    if len(found) > 1:
        names = dtype_names(found, "and")
        raise ValueError(f"parameters are {names}, but should have one dtype per group [{where}]")
    return found[0]


def _moved(params: Sequence[Tensor], dtype: torch.dtype, device: torch.device, unit: int) -> Tensor:
    """Move the parameters into one new buffer, which ends in zeros."""
    sizes = [param.numel() for param in params]
    flat = torch.zeros(-(-sum(sizes) // unit) * unit, dtype=dtype, device=device)
    for param, place in zip(
        params, torch.split(flat[: sum(sizes)], sizes) if params else (), strict=True
    ):
        place.view(param.shape).copy_(param.detach())
        param.data = place.view(param.shape)
    return flat


def flat_gradient(grad: Tensor) -> Tensor:
    """Elements of a gradient in a row; an expanded one is copied."""
    return grad.detach().reshape(-1).contiguous()


def accumulate_gradients(groups: Sequence[PartitionedGroup]) -> None:
    """Add the parameters' own gradients to the accumulators: one launch for each dtype of them."""
    views, grads = [], []
    for group in groups:
        for index, (param, view) in enumerate(zip(group.params, group.gradients(), strict=True)):
            if param.grad is not None:
                views.append(view)
                grads.append(flat_gradient(param.grad))
                group.has_gradient[index] = True
    accumulate_(views, grads)


def immediate_hooks(groups: Sequence[PartitionedGroup]) -> list[RemovableHandle]:
    """Accumulate each gradient when backward has it, and drop it: it cannot count twice."""
    hooks = []
    for group in groups:
        tables = TableCache(limit=len(group.params))
        start = 0
        for index, param in enumerate(group.params):
            # The garbage collector does not see what hooks hold.
            part = _Part(weakref.ref(group), index, start, param.numel(), tables)
            hooks.append(param.register_post_accumulate_grad_hook(part.accumulate))  # type: ignore[no-untyped-call]
            start += param.numel()
    return hooks


class _Part:
    """The part of an accumulator that belongs to one parameter."""

    def __init__(
        self,
        group: weakref.ref[PartitionedGroup],
        index: int,
        start: int,
        size: int,
        tables: TableCache,
    ) -> None:
        self._group, self._index = group, index
        self._start, self._size, self._tables = start, size, tables
        self._known: tuple[object, FixedTensors, Layout] | None = None

    @torch.no_grad()
    def accumulate(self, param: Tensor) -> None:
        """Add the parameter's gradient and drop it; the cost is that of one launch."""
        group = self._group()
        if group is None or param.grad is None:
            return
        grad, param.grad = waited(param.grad), None
        plain = grad.layout == torch.strided and grad.is_contiguous() and grad.dtype in FLOATS
        key = (group.accumulator.data_ptr(), grad.dtype)
        if self._known is None or self._known[0] != key:
            part = group.accumulator.narrow(0, self._start, self._size)
            self._known = key, FixedTensors([part]), Layout([grad])
        _, parts, layout = self._known
        if plain:
            moving = MovingTensors([grad], array("q", [grad.data_ptr()]), layout)
            accumulate_lists(parts, moving, self._tables)
        else:
            accumulate_(parts, [flat_gradient(grad)])
        group.has_gradient[self._index] = True


def copy_masters_to_model(groups: Sequence[PartitionedGroup]) -> None:
    """Write this rank's masters into the model weights, each rounded once."""
    sources = [group.master.detach() for group in groups]
    cast_copy_(sources, [group.own(group.flat) for group in groups])


def copy_model_to_masters(groups: Sequence[PartitionedGroup]) -> None:
    """Write the model weights into this rank's masters."""
    targets = [group.master.detach() for group in groups]
    cast_copy_([group.own(group.flat) for group in groups], targets)


def gather(groups: Sequence[PartitionedGroup], bucket: int) -> None:
    """Bring the model weights of all ranks together, in place where one message does it.

    Args:
        groups: their flat buffers are written.
        bucket: largest number of elements that one message brings together; one of each rank if
            it is less.
    """
    for group in groups:
        _gather(group, bucket)


def _gather(group: PartitionedGroup, bucket: int) -> None:
    size = group.partition_size
    if group.process_group is None or group.world == 1 or not size:
        return
    step = max(bucket // group.world, 1)
    if step >= size:
        _all_gather(group.flat, group.own(group.flat), group.process_group)
        return
    shards = group.flat.view(group.world, size)
    room = group.flat.new_empty(group.world * step)
    for start in range(0, size, step):
        piece = shards[:, start : start + step]
        received = room[: piece.numel()]
        _all_gather(received, piece[group.rank], group.process_group)
        piece.copy_(received.view(piece.shape))


def _all_gather(received: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    # torch 2.13 has a new name, and a warning for the old one.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(received, own, group=group)
