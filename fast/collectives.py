"""Groups of ranks: which gradients are the same on several ranks, and who adds up what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Groups = Sequence[dist.ProcessGroup]
ExpertGroups = Mapping[str, dist.ProcessGroup]
RANK_GETTERS = (
    "get_tensor_model_parallel_rank",
    "get_slice_parallel_rank",
    "get_model_parallel_rank",
)


class ModelParallelUnit(Protocol):
    """A model-parallel unit (`mpu`); it has one of RANK_GETTERS as well."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold one model together."""

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model."""


class Engine(Protocol):
    """An engine handle."""

    enable_backward_allreduce: bool


def tensor_parallel_rank(mpu: ModelParallelUnit | None) -> int:
    """This rank's place in its tensor-parallel group; 0 without a unit.

    Raises:
        AttributeError: the unit has no getter of it.
    """
    if mpu is None:
        return 0
    for name in RANK_GETTERS:
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    raise AttributeError(f"mpu has none of {', '.join(RANK_GETTERS)} [{type(mpu).__name__}]")


def is_expert(param: Tensor) -> bool:
    """Whether the parameter belongs to an expert: it says `allreduce` = False."""
    return not getattr(param, "allreduce", True)


def expert_name(param: Tensor) -> str | None:
    """Name of the expert-parallel group that a parameter is split over; None of shared ones."""
    return str(getattr(param, "group_name", "")) if is_expert(param) else None


def counts_here(param: Tensor, tensor_rank: int) -> bool:
    """Whether this rank's gradient counts in a norm over the model.

    Replicas of a pipeline stage do not (`ds_pipe_replicated`). On tensor-parallel ranks after the
    first, only what is split over them does (`model_parallel`, `tensor_model_parallel`).
    """
    split = ("model_parallel", "tensor_model_parallel")
    first_or_split = tensor_rank == 0 or any(getattr(param, mark, False) for mark in split)
    return first_or_split and not getattr(param, "ds_pipe_replicated", False)


@dataclass(frozen=True, kw_only=True)
class Share:
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

    shares: Sequence[Share]
    uncounted: Sequence[Tensor] = ()
    unreduced: Groups = ()
    model: Groups = ()

    @property
    def counted(self) -> list[Tensor]:
        """What counts on this rank."""
        return [tensor for share in self.shares for tensor in share.tensors]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What an optimizer was told of other ranks.

    Attributes:
        mpu: the model-parallel unit.
        engine: that reduces gradients in backward, or not.
        experts: by name, groups whose ranks hold different experts.
        replicas: by name, groups whose ranks hold the same experts.
    """

    mpu: ModelParallelUnit | None = None
    engine: Engine | None = None
    experts: ExpertGroups = field(default_factory=dict)
    replicas: ExpertGroups = field(default_factory=dict)

    def gradients(
        self,
        params: Iterable[Tensor],
        of: Callable[[Callable[[Tensor], bool]], list[Tensor]],
        *,
        without_experts: bool = False,
    ) -> Gradients:
        """Sort gradients by what they count for.

        Args:
            params: all.
            of: gives the gradients of the parameters that a predicate holds for.
            without_experts: experts do not count.
        """
        rank = tensor_parallel_rank(self.mpu)

        def counts(param: Tensor) -> bool:
            return counts_here(param, rank) and not (without_experts and is_expert(param))

        def under(name: str | None) -> list[Tensor]:
            return of(lambda param: counts(param) and expert_name(param) == name)

        # All ranks have to meet collectives in one order: every known name has its share.
        present = {str(expert_name(param)) for param in params if is_expert(param)}
        experts = [
            Share(
                tensors=under(name),
                experts=self.experts.get(name),
                replicas=self.replicas.get(name),
            )
            for name in sorted({*self.experts, *self.replicas, *present})
        ]
        return Gradients(
            shares=[Share(tensors=under(None)), *experts],
            uncounted=of(lambda param: not counts(param)),
            unreduced=self._unreduced(),
            model=[] if self.mpu is None else [self.mpu.get_model_parallel_group()],
        )

    def _unreduced(self) -> Groups:
        if self.engine is None or self.engine.enable_backward_allreduce:
            return []
        everyone = dist.group.WORLD
        group = everyone if self.mpu is None else self.mpu.get_data_parallel_group()
        return [] if group is None else [group]
