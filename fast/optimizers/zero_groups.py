"""Parameter groups of ZeRO: masters and reduced gradients of one rank, in the order they lie in.

    reduced       length P, in the accumulation dtype: reduced gradients of this rank's partition
    accumulator   as long as flat, on every rank: sums of this rank that are not reduced yet; it
                  has no element before `fill_grad_accum_attribute` (stage 1: backward) needs it

Names and layout of everything else are those of `bf16_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import counts_in_norm
from twinstep.contract.zero import ZeroOptions
from twinstep.fast.optimizers.bf16_groups import PartitionedGroup, partitioned_group


@dataclass(eq=False, kw_only=True)
class ZeroGroup(PartitionedGroup):
    """One parameter group.

    Attributes:
        reduced: this rank's partition of the reduced gradients since the last step.
        order: index in the group of the parameter that lies at each place.
        divisor: number of ranks whose mean is formed.
    """

    reduced: Tensor
    order: list[int]
    divisor: int

    @property
    def original(self) -> list[Tensor]:
        """The trained parameters in the order of the group, whatever order they lie in."""
        ordered = sorted(zip(self.order, self.params, strict=True), key=lambda pair: pair[0])
        return [param for _, param in ordered]

    def counted(self, grads: Tensor, tensor_rank: int, *, counts: bool) -> Iterator[Tensor]:
        """Parts of this rank's gradients that count in a norm on this rank, or those that do not.

        Neighbours are one part; `counts_in_norm` decides.
        """
        begin = end = 0
        for name, param in zip(self.names, self.params, strict=True):
            if name not in self.fragments or counts_in_norm(param, tensor_rank) != counts:
                continue
            place = self.fragments[name].in_partition
            if place.start != end:
                yield grads[begin:end]
                begin = place.start
            end = place.start + place.numel
        yield grads[begin:end]

    def make_sums(self) -> None:
        """Make the accumulator, if it has not been made."""
        if self.accumulator.numel() != self.flat.numel():
            self.accumulator = torch.zeros_like(self.flat, dtype=self.reduced.dtype)

    def lists(self, moments: Sequence[Tensor]) -> list[list[Tensor]]:
        """Master, reduced gradients, moments and model weights of this rank, in lists of one."""
        row = [self.master.detach(), self.reduced, *moments, self.own(self.flat)]
        return [[tensor] for tensor in row]


def dealt_order(count: int, world: int) -> list[int]:
    """Order of parameters under round robin: dealt to the ranks like cards, hand after hand."""
    hands: list[list[int]] = [[] for _ in range(world)]
    for index in range(count):
        hands[index % world].append(index)
    return list(chain.from_iterable(hands))


def zero_group(
    params: Sequence[Tensor],
    param_names: Mapping[Tensor, str],
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    where: str,
    *,
    options: ZeroOptions,
    round_robin: bool,
    data_world: int,
    expert: str | None = None,
    offloads: bool = False,
) -> ZeroGroup:
    """Lay out a group; the parameters become views of a new flat buffer and keep their values.

    Args:
        params: of one dtype; frozen ones are left out and left alone.
        param_names: a name for every trained parameter.
        process_group: ranks that share the group, or None.
        device: of all parameters.
        where: the class and the group, for messages.
        options: of the reduction.
        round_robin: deal parameters to the ranks in turn.
        data_world: number of data-parallel ranks; experts have their mean over these, too.
        expert: name of the expert group, or None.
        offloads: put masters and reduced gradients into the memory of the CPU.

    Raises:
        ValueError: dtypes are mixed or unknown, a parameter is elsewhere or has no name.
    """
    trained = [param for param in params if param.requires_grad]
    world = dist.get_world_size(process_group) if process_group is not None else 1
    order = dealt_order(len(trained), world) if round_robin else list(range(len(trained)))
    sums = options.gradient_accumulation_dtype
    laid_out = partitioned_group(
        [trained[index] for index in order],
        param_names,
        process_group,
        sums,
        device,
        where,
        expert=expert,
        accumulates=False,
    )
    if offloads:
        laid_out.master = laid_out.master.detach().cpu().requires_grad_()
    return ZeroGroup(
        **vars(laid_out),
        reduced=torch.zeros_like(laid_out.master, dtype=sums, requires_grad=False),
        order=order,
        divisor=world if expert is None else data_world,
    )
