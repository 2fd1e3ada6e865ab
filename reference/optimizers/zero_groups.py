"""Parameter groups of ZeRO: gradients summed on each rank, and reduced into partitions.

    accumulator   on every rank, as long as flat: gradients of this rank that are not reduced yet
    reduced       length P: the mean over ranks, summed over micro-batches, of this rank's partition

With n ranks in the mean, a_r the accumulator of rank r, and wire(x) a rounding to the dtype in
which gradients are sent, the reduced gradient of all ranks is one of

    before    SUM_r wire(a_r / n)                              (reduce_scatter, or no postscale)
    after     wire( f/n * SUM_r wire( 1/f * wire(a_r) ) )      (postscale, f = predivide factor)
    sum       SUM_r wire(a_r)                                  (no average)

where each addition rounds to the same dtype, in the order of the process group. This rank's
partition of it is added to `reduced`, rounded to that dtype. The layout is that of
`reference.partition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import counts_in_norm
from twinstep.contract.zero import ZeroOptions
from twinstep.reference.accumulate import accumulate
from twinstep.reference.arithmetic import float64, fp32
from twinstep.reference.optimizers.collectives import summed
from twinstep.reference.optimizers.partitioned_groups import (
    PartitionedGroup,
    accumulate_gradient,
    partitioned_group,
)
from twinstep.reference.partition import inverse_order, round_robin_order


@dataclass(eq=False, kw_only=True)
class ZeroGroup(PartitionedGroup):
    """One parameter group.

    Attributes:
        reduced: this rank's partition of the reduced gradients since the last step.
        order: index in the group of the parameter that lies at each place.
        divisor: n, the number of ranks whose mean is formed.
    """

    reduced: Tensor
    order: list[int]
    divisor: int

    @property
    def original(self) -> list[Tensor]:
        """The trained parameters in the order of the group, whatever order they lie in."""
        return [self.params[place] for place in inverse_order(self.order)]

    def counted(self, tensor_rank: int) -> Iterator[Tensor]:
        """Parts of `reduced` that count in a norm on this rank; see `counts_in_norm`."""
        for name, param in zip(self.names, self.params, strict=True):
            if name in self.fragments and counts_in_norm(param, tensor_rank):
                place = self.fragments[name].in_partition
                yield self.reduced[place.start : place.start + place.numel]


def zero_group(
    params: Sequence[Tensor],
    param_names: Mapping[Tensor, str],
    process_group: dist.ProcessGroup | None,
    where: str,
    *,
    options: ZeroOptions,
    round_robin: bool,
    data_world: int,
    expert: str | None = None,
) -> ZeroGroup:
    """Lay out a group; the parameters become views of a new flat buffer and keep their values.

    Args:
        params: of one dtype; frozen ones are left out and left alone.
        param_names: a name for every trained parameter.
        process_group: ranks that share the group, or None.
        where: the class and the group, for messages.
        options: of the reduction.
        round_robin: lay parameters in the order of `round_robin_order`.
        data_world: number of data-parallel ranks; experts have their mean over these, too.
        expert: name of the expert group, or None.

    Raises:
        ValueError: dtypes are mixed or unknown, or a parameter has no name.
    """
    trained = [param for param in params if param.requires_grad]
    world = 1 if process_group is None else dist.get_world_size(process_group)
    order = round_robin_order(len(trained), world) if round_robin else list(range(len(trained)))
    sums = options.gradient_accumulation_dtype
    laid_out = partitioned_group(
        [trained[index] for index in order],
        param_names,
        process_group,
        sums,
        where,
        expert=expert,
    )
    return ZeroGroup(
        **vars(laid_out),
        reduced=torch.zeros(laid_out.partition_size, dtype=sums),
        order=order,
        divisor=world if expert is None else data_world,
    )


def take_gradients(group: ZeroGroup) -> bool:
    """Add the parameters' own gradients to the sums of this rank, and drop them.

    Returns:
        True if there was one.
    """
    found = False
    for index, param in enumerate(group.params):
        found |= param.grad is not None
        accumulate_gradient(group, index)
        param.grad = None
    return found


def reduce_group(group: ZeroGroup, options: ZeroOptions) -> None:
    """Add this rank's partition of the reduced gradients to its sums, and clear those of before."""
    mean = averaged(group, options)
    (total,) = accumulate([group.reduced], [group.own(mean)])
    group.reduced.copy_(total)
    group.accumulator.zero_()


def averaged(group: ZeroGroup, options: ZeroOptions) -> Tensor:
    """The reduced gradients of all ranks, laid out like `flat`, in the dtype of the wire."""
    wire = options.communication_data_type or group.flat.dtype
    ranks = [] if group.process_group is None else [group.process_group]
    own, n, f = group.accumulator, group.divisor, options.gradient_predivide_factor
    if not options.gradient_average:
        return summed(own.to(wire), ranks)
    if options.reduce_scatter or not options.postscale_gradients:
        return summed((fp32(own) / fp32(float64(n))).to(wire), ranks)
    divided = (fp32(own.to(wire)) * fp32(float64(1.0 / f))).to(wire)
    return (fp32(summed(divided, ranks)) * fp32(float64(f / n))).to(wire)


def clear_sums(group: ZeroGroup) -> None:
    """Forget all gradients since the last step."""
    group.accumulator.zero_()
    group.reduced.zero_()
    group.has_gradient = [False] * len(group.params)
