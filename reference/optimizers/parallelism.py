"""Ranks that hold a model together: overflows that they agree on, and norms over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.agreement import largest_on_all_ranks
from twinstep.contract.moe import expert_name
from twinstep.contract.parallel import (
    Engine,
    ExpertGroups,
    Groups,
    ModelParallelUnit,
    counts_in_norm,
    tensor_parallel_rank,
)
from twinstep.reference.optimizers.model_norm import Part, norm_of_parts
from twinstep.reference.unscale import worst_of

Pairs = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Process groups of an optimizer; without any, this rank is alone.

    Attributes:
        mpu: the model-parallel unit.
        engine: asked whether backward reduces gradients over ranks.
        expert_groups: by name; their ranks hold different experts.
        expert_data_groups: by name; their ranks hold the same experts.
    """

    mpu: ModelParallelUnit | None = None
    engine: Engine | None = None
    expert_groups: ExpertGroups = field(default_factory=dict)
    expert_data_groups: ExpertGroups = field(default_factory=dict)

    def counted(self, pairs: Pairs) -> Pairs:
        """Parameters whose gradients count on this rank in a norm, with these."""
        rank = tensor_parallel_rank(self.mpu)
        return [(param, grad) for param, grad in pairs if counts_in_norm(param, rank)]

    def worst(
        self, prepare: Callable[[], Pairs], scale: float | None = None
    ) -> tuple[Pairs, float]:
        """This rank's gradients, and the worst of all ranks, as of `reference.unscale.worst_of`.

        Args:
            prepare: returns parameters with their gradients. An error of it is one of all ranks.
            scale: that the gradients were made with, which all ranks should have alike.

        Raises:
            ValueError: another rank could not prepare, or has another scale.
        """
        # By name: collectives must be met in one order, and ranks may fill their dicts in any.
        named = (self.expert_groups, self.expert_data_groups)
        experts = [groups[name] for groups in named for name in sorted(groups)]
        return largest_on_all_ranks(
            prepare,
            overflow_groups(self.mpu, self.engine, experts),
            torch.device("cpu"),
            largest=lambda pairs: worst_of([grad for _, grad in pairs]).item(),
            same={} if scale is None else {"loss scale": lambda _: scale},
        )

    def global_norm(self, pairs: Pairs, norm_type: float, worst: float) -> Tensor:
        """Norm of the gradients as stored, every element of the model once; fp32, shape ().

        Not finite where `worst` reports that any gradient is not, even if it does not count.
        """
        model = [] if self.mpu is None else [self.mpu.get_model_parallel_group()]
        counted = self.counted(pairs)
        parts = gradient_parts(counted, model, self.expert_groups, self.expert_data_groups)
        return norm_of_parts(parts, norm_type, worst=worst)


def with_gradients(params: Iterable[Tensor]) -> Pairs:
    """Parameters that have a gradient, with it."""
    return [(param, param.grad) for param in params if param.grad is not None]


def overflow_groups(
    mpu: ModelParallelUnit | None, engine: Engine | None, expert_groups: Groups
) -> list[dist.ProcessGroup]:
    """Over whom an overflow is agreed, in order.

    Experts differ from rank to rank, so all their groups come first. Gradients of everything else
    are the same on all data-parallel ranks once they are reduced; where the engine does not reduce
    them in backward, those ranks are asked too.
    """
    groups = list(expert_groups)
    local = engine is not None and not engine.enable_backward_allreduce
    if mpu is not None:
        groups += [mpu.get_data_parallel_group()] if local else []
        groups.append(mpu.get_model_parallel_group())
    elif local:
        world = dist.group.WORLD
        groups += [] if world is None else [world]
    return groups


def gradient_parts(
    pairs: Pairs,
    model_groups: Sequence[dist.ProcessGroup],
    expert_groups: ExpertGroups,
    expert_data_groups: ExpertGroups,
) -> list[Part]:
    """Gradients in parts, those whose sums are added over the same ranks together.

    Shared gradients are added over the model-parallel groups. Experts of each name are added over
    their expert-parallel group before, since every rank of it holds others, and averaged over their
    expert-data-parallel group, whose ranks hold the same.

    Args:
        pairs: parameters, whose marks say where a gradient belongs, and gradients of this rank.
        model_groups: for all gradients.
        expert_groups: by name.
        expert_data_groups: by name; an expert whose name is in neither is on this rank alone.
    """
    named: dict[str | None, list[Tensor]] = {None: []}
    for param, grad in pairs:
        name = expert_name(param)
        known = name in expert_groups or name in expert_data_groups
        named.setdefault(name if known else None, []).append(grad)
    parts = [Part(tensors=named[None], groups=model_groups)]
    # Collectives must be met in one order on all ranks: every known name has its part, no other.
    for name in sorted({*expert_groups, *expert_data_groups}):
        parts.append(
            Part(
                tensors=named.get(name, []),
                experts=[expert_groups[name]] if name in expert_groups else [],
                replicas=expert_data_groups.get(name),
                groups=model_groups,
            )
        )
    return parts
