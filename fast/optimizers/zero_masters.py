"""Masters and state of ZeRO on this side: laid out, made, copied to and from the model, loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.checkpoint.entries import Loaded
from twinstep.contract.compat import CORRECT
from twinstep.contract.loss_scale import Saved
from twinstep.contract.moe import check_has_experts, expert_of_group
from twinstep.contract.moments import MOMENTS
from twinstep.contract.parallel import tensor_parallel_rank
from twinstep.contract.sharded import Sharded
from twinstep.contract.wrapper import initialize
from twinstep.contract.zero import check_expert_groups, check_names
from twinstep.fast.optimizers.bf16_groups import (
    copy_masters_to_model,
    copy_model_to_masters,
    gather,
)
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.parallelism import Gradients
from twinstep.fast.optimizers.scaled_wrapper import ScaledWrapper
from twinstep.fast.optimizers.scalers import saved_scale
from twinstep.fast.optimizers.zero_buckets import BucketedReduction
from twinstep.fast.optimizers.zero_groups import ZeroGroup, zero_group
from twinstep.fast.optimizers.zero_offload import Offload
from twinstep.fast.optimizers.zero_report import ZeroDriver

GRADIENTS, STEP, ALLGATHER = "optimizer_gradients", "optimizer_step", "optimizer_allgather"


class ZeroMasters(Sharded, ScaledWrapper):
    """A wrapper whose masters are split over ranks; see `ZeroOptimizer` for the arguments.

    Attributes:
        groups: as laid out on this rank.
    """

    groups: list[ZeroGroup]
    _data_group: dist.ProcessGroup | None
    _buckets: BucketedReduction
    _step: ZeroDriver
    _offload: Offload | None
    _unscaled = "the model"

    def _laid_out(self, names: Mapping[Tensor, str], round_robin: bool) -> list[ZeroGroup]:
        """Lay out all groups, experts over their own ranks."""
        moe, data, inner = self.options.has_moe_layers, self._data_group, self._held()
        wheres = [f"group {index}, ZeroOptimizer" for index in range(len(inner.param_groups))]
        experts = [
            expert_of_group(group, moe, where)
            for group, where in zip(inner.param_groups, wheres, strict=True)
        ]
        if moe:
            check_has_experts(experts, "ZeroOptimizer")
        check_names([names[param] for param in trained(inner) if param in names])
        named = {name for name in experts if name is not None}
        check_expert_groups(named, self.expert_groups, self.expert_data_groups, data)
        given: list[list[Tensor]] = [group["params"] for group in inner.param_groups]
        device = next(chain.from_iterable(given)).device
        return [
            zero_group(
                params,
                names,
                data if expert is None else self.expert_data_groups[expert],
                device,
                where,
                options=self.options,
                round_robin=round_robin,
                data_world=1 if data is None else dist.get_world_size(data),
                expert=expert,
                offloads=self._offload is not None,
            )
            for params, expert, where in zip(given, experts, wheres, strict=True)
        ]

    def _everyone(self) -> list[dist.ProcessGroup]:
        """Data-parallel ranks, then those that hold one model together."""
        model = None if self.mpu is None else self.mpu.get_model_parallel_group()
        return [group for group in (self._data_group, model) if group is not None]

    def _partitions(self) -> list[ZeroGroup]:
        return self.groups

    def initialize_optimizer_states(self) -> None:
        """Allocate the state of the inner optimizer; no value changes, on no Compat."""
        self._sync_state()
        self._pending.clear()
        initialize(self._held(), self.single_partition_of_fp32_groups, CORRECT)

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Model weights := masters of all ranks."""
        if self._offload is None:
            copy_masters_to_model(self.groups)
        else:
            for group in self.groups:
                group.own(group.flat).copy_(group.master)
        self._gather()

    def _gather(self) -> None:
        gather(self.groups, self.options.allgather_bucket_size)

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after these were loaded or changed."""
        if self._offload is None:
            copy_model_to_masters(self.groups)
        else:
            for group in self.groups:
                group.master.copy_(group.own(group.flat))

    def get_full_hp_grad(self, name: str) -> Tensor:
        """The reduced gradient of a parameter since the last step; all ranks must call it.

        As it is stored: multiplied by the loss scale and not clipped. Stage 1 has none before
        `reduce_gradients`.
        """
        if self._offload is not None:
            self._offload.fold()
        return super().get_full_hp_grad(name)

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients, sums of them, buckets, and inner state."""
        return self._bytes(
            model_weights=self.bit16_groups_flat,
            master_weights=self.single_partition_of_fp32_groups,
            gradients=[param.grad for param in self._params()],
            accumulators=[t for group in self.groups for t in (group.accumulator, group.reduced)],
            buckets=self._buckets.buffers(),
        )

    def _saved_scale(self) -> Saved:
        self._sync_state()
        return saved_scale(self.loss_scaler) if self.scales else {}

    def _restored_scale(self) -> Callable[[Mapping[str, object]], dict[str, float]] | None:
        return self.loss_scaler.restored if self.scales else None

    def _enter_loaded(self, loaded: Loaded, scaling: object) -> None:
        if loaded.inner is not None:
            self._load_inner(loaded.inner)
        self.loss_scaler.enter(cast("dict[str, float]", scaling) or {})

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """A timed phase, by the name that the driver has for it."""
        return self._timed({"compute_norm": GRADIENTS, "basic_step": STEP}[name])

    def _reduced_gradients(self) -> Gradients:
        """Reduced gradients of this rank, by whether they count in the norm on this rank."""
        rank = tensor_parallel_rank(self.mpu)
        grads = [group.reduced for group in self.groups]
        if self._offload is not None:
            grads = [self._offload.gradients(reduced) for reduced in grads]
        pairs = list(zip(self.groups, grads, strict=True))
        counted, rest = (
            [part for group, own in pairs for part in group.counted(own, rank, counts=counts)]
            for counts in (True, False)
        )
        return self._step.gradients(counted, rest, taken=self._buckets.taken)

    def _group_tensors(self, index: int) -> GroupTensors:
        group = self.groups[index]
        state = self._state_to_step(group.master)
        moments = [state[name] for name in MOMENTS]
        row = [group.master, group.reduced, *moments, group.flat]
        fixed = self._fixed[index].of(row, partial(group.lists, moments))
        bias_correction = bool(self.param_groups[index]["bias_correction"])
        return GroupTensors(lists=fixed, steps=[state["step"]], bias_correction=bias_correction)


def trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters of an optimizer that are trained."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [param for param in params if param.requires_grad]
