"""Groups of ranks: the handles that an optimizer is given, and which gradients count where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    raise AttributeError(
        f"mpu has none of {', '.join(RANK_GETTERS)}, but should have one [{type(mpu).__name__}]"
    )


def counts_in_norm(param: Tensor, tensor_rank: int) -> bool:
    """True if this rank's gradient of the parameter counts in a norm over the model.

    A replica of a pipeline stage does not (`ds_pipe_replicated`). On tensor-parallel ranks after
    the first, only what is split over them does (`model_parallel` or `tensor_model_parallel`).
    """
    if getattr(param, "ds_pipe_replicated", False):
        return False
    marks = ("model_parallel", "tensor_model_parallel")
    return tensor_rank == 0 or any(getattr(param, mark, False) for mark in marks)
