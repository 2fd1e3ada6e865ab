"""Masters, state and gradients of ZeRO from outside: whole, by name, and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twinstep.contract.checkpoint import elastic, universal
from twinstep.contract.checkpoint.elastic import Expert
from twinstep.contract.compat import CORRECT
from twinstep.contract.fragments import FragmentAddress
from twinstep.contract.moments import StateDict
from twinstep.contract.whole import WholeTensors
from twinstep.contract.wrapper import initialize
from twinstep.contract.zero import ZeroOptions
from twinstep.reference.optimizers.partitioned_groups import (
    copy_masters_to_model,
    copy_model_to_masters,
    gather,
)
from twinstep.reference.optimizers.scaled_wrapper import ScaledWrapper
from twinstep.reference.optimizers.scalers import saved_scale
from twinstep.reference.optimizers.zero_groups import ZeroGroup


class ZeroMasters(ScaledWrapper):
    """A wrapper whose masters are split over ranks; see `ZeroOptimizer` for the arguments.

    Attributes:
        groups: as laid out on this rank.
        options: of the reduction.
    """

    groups: list[ZeroGroup]
    options: ZeroOptions
    _unscaled = "the model"

    @property
    def partition_gradients(self) -> bool:
        """True in stage 2."""
        return self.options.partition_grads

    @property
    def bit16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group, in the order in which they were given."""
        return [group.original for group in self.groups]

    @property
    def round_robin_bit16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group, in the order in which they lie."""
        return [group.params for group in self.groups]

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """The flat model weights, padding included."""
        return [group.flat for group in self.groups]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The masters of this rank."""
        return [group.master for group in self.groups]

    @property
    def partition_size(self) -> list[int]:
        """Elements of a partition, by group."""
        return [group.partition_size for group in self.groups]

    @property
    def groups_padding(self) -> list[int]:
        """Elements of this rank's partitions that belong to no parameter, by group."""
        return [group.padding for group in self.groups]

    @property
    def param_slice_mappings(self) -> list[dict[str, FragmentAddress]]:
        """By group: where each parameter lies in the master of this rank."""
        return [
            {name: fragment.in_partition for name, fragment in group.fragments.items()}
            for group in self.groups
        ]

    def initialize_optimizer_states(self) -> None:
        """Allocate the state of the inner optimizer; no value changes, under any `Compat`."""
        initialize(self.optimizer, self.single_partition_of_fp32_groups, CORRECT)

    def update_lp_params(self) -> None:
        """Model weights := masters of all ranks."""
        with torch.no_grad():
            for group in self.groups:
                copy_masters_to_model(group)
                gather(group, self.options.allgather_bucket_size)

    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after these were loaded or changed."""
        for group in self.groups:
            copy_model_to_masters(group)

    def get_full_hp_param(self, name: str, key: str | None = None) -> Tensor:
        """The whole fp32 weight of a parameter, or a state of it; all ranks must call it."""
        return WholeTensors(self.groups).read(self.optimizer, name, key)

    def set_full_hp_param(self, name: str, value: Tensor, key: str | None = None) -> None:
        """Write this rank's part of a whole fp32 weight or state; model weights stay."""
        WholeTensors(self.groups).write(self.optimizer, name, value, key)

    def get_full_hp_grad(self, name: str) -> Tensor:
        """The reduced gradient of a parameter since the last step; all ranks must call it.

        As it is stored: multiplied by the loss scale and not clipped. Stage 1 has none before
        `reduce_gradients`.
        """
        reduced = [group.reduced for group in self.groups]
        return WholeTensors(self.groups).partitioned(name, reduced)

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients, sums of them, and inner state."""
        return self._bytes(
            model_weights=self.bit16_groups_flat,
            master_weights=self.single_partition_of_fp32_groups,
            gradients=[param.grad for param in self._params()],
            accumulators=[t for group in self.groups for t in (group.accumulator, group.reduced)],
        )

    def state_dict(self) -> StateDict:
        """The entry of this rank, by parameter; see `contract.checkpoint.elastic`."""
        return elastic.saved(
            self.groups,
            self.optimizer,
            self._experts(),
            stage=2 if self.partition_gradients else 1,
            clip_grad=self.clip_grad,
            scale=saved_scale(self.loss_scaler) if self.scales else {},
        )

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict_list: Sequence[StateDict | None],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: Path | None = None,
    ) -> None:
        """Load states of this class from any number of ranks; every rank must call it.

        Args:
            state_dict_list: entries of the data-parallel ranks that saved; those that hold nothing
                of this rank's partitions may be None.
            load_optimizer_states: False leaves the state of the inner optimizer.
            load_from_fp32_weights: take the saved masters, and write them to the model; otherwise
                masters come from the model weights, which the caller has loaded.
            checkpoint_folder: read a universal checkpoint from there instead, which always brings
                its masters, and no loss scale.

        Raises:
            ValueError: something does not fit; the sentence names it. Nothing has changed.
        """
        given, states = (self.groups, self.optimizer), load_optimizer_states
        scaling = None
        if checkpoint_folder is None:
            loaded, scaling = elastic.checked(
                *given,
                self._experts(),
                state_dict_list,
                self.ranks,
                restored=self.loss_scaler.restored if self.scales else None,
                states=states,
            )
        else:
            loaded = universal.read_partitions(*given, checkpoint_folder, self.ranks, states=states)
        # Everything fits from here on.
        if loaded.inner is not None:
            self.optimizer.load_state_dict(loaded.inner)
        self.loss_scaler.state = scaling or self.loss_scaler.state
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        if load_from_fp32_weights or checkpoint_folder is not None:
            for group, master in zip(self.groups, loaded.masters, strict=True):
                group.master.detach().copy_(master)
            self.update_lp_params()
        else:
            self.refresh_fp32_params()

    def _experts(self) -> list[Expert]:
        """By group, the name of its experts, and this rank among those that hold others."""
        return [
            None
            if group.expert is None
            else [
                group.expert,
                dist.get_rank(self.expert_groups[group.expert]),
                dist.get_world_size(self.expert_groups[group.expert]),
            ]
            for group in self.groups
        ]

    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable(group.params for group in self.groups))
