"""Groups of ranks: which gradients are the same on several ranks, and who adds up what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from twinstep.contract.moe import expert_name, is_moe_param
from twinstep.contract.parallel import (
    Engine,
    ExpertGroups,
    Groups,
    ModelParallelUnit,
    counts_in_norm,
    tensor_parallel_rank,
)


@dataclass(frozen=True)
class Place:
    """Home of a gradient in the norm: an expert group by name, what is shared, or nowhere.

    Attributes:
        name: of the experts; None for what is shared.
        counts: in the norm.
    """

    name: str | None = None
    counts: bool = True


SHARED, NOWHERE = Place(), Place(counts=False)


@dataclass(frozen=True, kw_only=True)
class NormBucket:
    """Gradients whose sum is formed over the same ranks.

    Attributes:
        tensors: of this rank.
        experts: ranks that hold other experts, over which the sum is added first; or None.
        replicas: ranks that hold the same experts, over which that is averaged; or None.
    """

    tensors: Sequence[Tensor]
    experts: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """All gradients of a step, and the ranks that have to agree about them.

    Attributes:
        shares: what counts in the norm; in the same order on all ranks.
        uncounted: what can overflow, no more.
        unreduced: ranks whose gradients differ since nobody has reduced them.
        model: ranks that hold one model together; all sums are added over them at last.
    """

    shares: Sequence[NormBucket]
    uncounted: Sequence[Tensor] = ()
    unreduced: Groups = ()
    model: Groups = ()

    @cached_property
    def over_ranks(self) -> bool:
        """True if there is any group."""
        if self.model or self.unreduced:
            return True
        return any(share.experts or share.replicas for share in self.shares)

    @cached_property
    def one_sum(self) -> bool:
        """True if all gradients are added over the same ranks."""
        alone = all(share.experts is None and share.replicas is None for share in self.shares)
        return alone and not self.uncounted and not self.unreduced

    @property
    def counted(self) -> Sequence[Tensor]:
        """Gradients that count on this rank."""
        if len(self.shares) == 1:
            return self.shares[0].tensors
        return [tensor for share in self.shares for tensor in share.tensors]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Process groups of an optimizer; without any, this rank is alone.

    Attributes:
        mpu: the model-parallel unit.
        engine: that reduces gradients in backward, or not.
        expert_groups: by name; groups whose ranks hold different experts.
        expert_data_groups: by name; groups whose ranks hold the same experts.
    """

    mpu: ModelParallelUnit | None = None
    engine: Engine | None = None
    expert_groups: ExpertGroups = field(default_factory=dict)
    expert_data_groups: ExpertGroups = field(default_factory=dict)

    def places(self, params: Iterable[Tensor], *, without_experts: bool = False) -> list[Place]:
        """Home of each parameter's gradient in the norm.

        Args:
            params: in the caller's order.
            without_experts: experts do not count.
        """
        rank = tensor_parallel_rank(self.mpu)
        known: dict[str | None, Place] = {name: Place(name) for name in self._names()}
        found = []
        for param in params:
            if not counts_in_norm(param, rank) or (without_experts and is_moe_param(param)):
                found.append(NOWHERE)
            else:
                # An expert of no group is on this rank alone, like what is shared.
                found.append(known.get(expert_name(param), SHARED) if known else SHARED)
        return found

    def gradients(self, at: Mapping[Place, Sequence[Tensor]]) -> Gradients:
        """All gradients, given those at each place."""
        # All ranks have to meet collectives in one order: every known name has its share.
        experts = [
            NormBucket(
                tensors=at.get(Place(name), ()),
                experts=self.expert_groups.get(name),
                replicas=self.expert_data_groups.get(name),
            )
            for name in self._names()
        ]
        return Gradients(
            shares=[NormBucket(tensors=at.get(SHARED, ())), *experts],
            uncounted=at.get(NOWHERE, ()),
            unreduced=self._unreduced(),
            model=[] if self.mpu is None else [self.mpu.get_model_parallel_group()],
        )

    @property
    def alone(self) -> bool:
        """True if no rank is asked for anything: gradients at the same places are the same."""
        if self.mpu is not None or self.expert_groups or self.expert_data_groups:
            return False
        return self.engine is None or bool(self.engine.enable_backward_allreduce)

    def _names(self) -> list[str]:
        return sorted({*self.expert_groups, *self.expert_data_groups})

    def _unreduced(self) -> Groups:
        if self.engine is None or self.engine.enable_backward_allreduce:
            return []
        everyone = dist.group.WORLD
        group = everyone if self.mpu is None else self.mpu.get_data_parallel_group()
        return [] if group is None else [group]
