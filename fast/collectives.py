"""Groups of ranks: which gradients are the same on several ranks, and who adds up what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

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
