"""Groups of ranks: the handles that an optimizer is given, and which gradients count where."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

Groups = Sequence[dist.ProcessGroup]
ExpertGroups = Mapping[str, dist.ProcessGroup]
# Arguments with process groups by the names of experts.
EXPERT_ARGUMENTS = (
    *("expert_groups", "expert_data_groups"),
    *("expert_parallel_group", "expert_data_parallel_group"),
)
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


def data_parallel_group(
    given: dist.ProcessGroup | None, mpu: ModelParallelUnit | None
) -> dist.ProcessGroup | None:
    """The ranks over which masters are split: those given, of the unit, or of the whole job.

    None in a job of one rank. Without the default each rank of several would train alone.

    Raises:
        RuntimeError: a launcher says that there are several ranks, but nothing connects them.
    """
    if given is not None:
        return given
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if not dist.is_initialized() and launched > 1:
        raise RuntimeError(
            f"torch.distributed is not initialised in a job of {launched} ranks, but should be, or "
            "each would train alone: call torch.distributed.init_process_group first"
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD if mpu is None else mpu.get_data_parallel_group()


def groups_given(arguments: Mapping[str, object]) -> Groups:
    """All process groups among the arguments of a constructor, in one order on all ranks.

    Args:
        arguments: `dp_process_group`, those of EXPERT_ARGUMENTS, `mpu` and `deepspeed` count, as
            far as they are there.
    """
    mpu, engine = arguments.get("mpu"), arguments.get("deepspeed")
    found: list[object] = [arguments.get("dp_process_group")]
    for key in EXPERT_ARGUMENTS:
        named = cast("ExpertGroups", arguments.get(key) or {})
        found += [named[name] for name in sorted(named)]
    for getter in ("get_data_parallel_group", "get_model_parallel_group"):
        found += [getattr(mpu, getter)()] if hasattr(mpu, getter) else []
    if mpu is None and not getattr(engine, "enable_backward_allreduce", True):
        found.append(dist.group.WORLD)
    return [cast(dist.ProcessGroup, group) for group in dict.fromkeys(found) if group is not None]


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
