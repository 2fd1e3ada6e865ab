"""A step's facts on which all ranks agree, in one message.

Every rank sums the squares of its own partitions, as a whole number; the sum over ranks is then
that of the whole model, each element once, whatever the number and the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch.distributed as dist
from torch import Tensor

from twinstep.contract.parallel import Groups
from twinstep.reference.optimizers.model_norm import exact_sum, norm_of_squares
from twinstep.reference.optimizers.zero_groups import ZeroGroup
from twinstep.reference.unscale import past_squares, worst_of


@dataclass(frozen=True, kw_only=True)
class Report:
    """Facts of one rank, or of all of them together.

    Attributes:
        taken: a parameter had a gradient since the last step.
        worst: of the reduced gradients, as `reference.unscale.worst_of` reports it.
        squares: their exact sum of squares, as `exact_sum` counts.
        scales: smallest and largest loss scale.
    """

    taken: bool
    worst: float
    squares: int
    scales: tuple[float, float]

    @property
    def norm(self) -> Tensor:
        """Norm of the gradients as they are stored; fp32, shape ()."""
        return norm_of_squares(self.squares, self.worst)

    @property
    def overflow(self) -> bool:
        """True if the norm says so: not finite, or its square past fp32."""
        return past_squares(self.norm.item(), 2.0)

    def with_other(self, other: Report) -> Report:
        """Facts of both."""
        return Report(
            taken=self.taken or other.taken,
            worst=max(self.worst, other.worst),
            squares=self.squares + other.squares,
            scales=(min(self.scales[0], other.scales[0]), max(self.scales[1], other.scales[1])),
        )


def report(
    groups: Sequence[ZeroGroup],
    ranks: Groups,
    *,
    taken: bool,
    loss_scale: float,
    tensor_rank: int,
) -> Report:
    """Facts of all ranks; the same on each.

    Args:
        groups: of this rank.
        ranks: the data-parallel ranks, then those that hold one model together; one message each.
        taken: this rank has taken a gradient since the last step.
        loss_scale: of this rank.
        tensor_rank: place in the tensor-parallel group.

    Raises:
        ValueError: ranks have different loss scales; on every rank.
    """
    worst = worst_of([group.reduced for group in groups]).item()
    # Squares of what is not finite are no numbers, and are not asked for.
    counted = [part for group in groups for part in group.counted(tensor_rank)]
    own = Report(
        taken=taken,
        worst=worst,
        squares=0 if worst else exact_sum(counted),
        scales=(loss_scale, loss_scale),
    )
    for group in ranks:
        found: list[Report] = [own] * dist.get_world_size(group)
        dist.all_gather_object(found, own, group=group)
        own = reduce(Report.with_other, found)
    least, most = own.scales
    if least != most:
        raise ValueError(
            f"loss scale is {least} on one rank and {most} on another, but should be the same on "
            "all [ZeroOptimizer.step]"
        )
    return own
