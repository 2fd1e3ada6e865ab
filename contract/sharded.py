"""Masters, state and gradients that are split over ranks, from outside: whole, by name, saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from twinstep.contract.checkpoint import elastic, universal
from twinstep.contract.checkpoint.elastic import Expert
from twinstep.contract.checkpoint.entries import Loaded
from twinstep.contract.fragments import FragmentAddress, Partition
from twinstep.contract.loss_scale import Saved
from twinstep.contract.moments import StateDict
from twinstep.contract.whole import WholeTensors
from twinstep.contract.wrapper import Wrapper
from twinstep.contract.zero import ZeroOptions


class ZeroPartition(Partition, Protocol):
    """One rank's part of a parameter group, as `ZeroOptimizer` splits it."""

    @property
    def params(self) -> list[Tensor]:
        """The trained parameters, in the order in which they lie."""

    @property
    def original(self) -> list[Tensor]:
        """The trained parameters in the order of the group."""

    @property
    def reduced(self) -> Tensor:
        """This rank's partition of the reduced gradients since the last step."""


class Sharded(Wrapper, ABC):
    """Words of `ZeroOptimizer` that read and save; each side computes with its own arithmetic.

    Attributes:
        options: of the reduction.
        clip_grad: largest norm of the unscaled gradients; 0 or below does not clip.
        expert_groups: by name; their ranks hold different experts.
        elastic_checkpoint: states of any number of ranks are loaded.
        round_robin_gradients: parameters lie in another order; see `reference.partition`.
    """

    options: ZeroOptions
    clip_grad: float
    expert_groups: dict[str, dist.ProcessGroup]
    elastic_checkpoint: bool
    round_robin_gradients: bool
    loads_lists = True
    _model = "bit16_groups"

    @abstractmethod
    def _partitions(self) -> Sequence[ZeroPartition]:
        """The groups, as laid out on this rank."""

    @abstractmethod
    def _saved_scale(self) -> Saved:
        """Dict of the loss scale; empty where the loss has none."""

    @abstractmethod
    def _restored_scale(self) -> Callable[[Mapping[str, object]], object] | None:
        """A check of such a dict, whose result `_enter_loaded` takes; None without a scale."""

    @abstractmethod
    def _enter_loaded(self, loaded: Loaded, scaling: object) -> None:
        """Enter a checked state of the inner optimizer and of the loss scale."""

    @abstractmethod
    def update_lp_params(self) -> None:
        """Model weights := masters of all ranks."""

    @abstractmethod
    def refresh_fp32_params(self) -> None:
        """Masters := model weights, after these were loaded or changed."""

    @property
    def partition_gradients(self) -> bool:
        """True in stage 2."""
        return self.options.partition_grads

    @property
    def bit16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group, in the order in which they were given."""
        return [group.original for group in self._partitions()]

    @property
    def round_robin_bit16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group, in the order in which they lie."""
        return [group.params for group in self._partitions()]

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """The flat model weights, padding included."""
        return [group.flat for group in self._partitions()]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The masters of this rank."""
        return [group.master for group in self._partitions()]

    @property
    def partition_size(self) -> list[int]:
        """Elements of a partition, by group."""
        return [group.partition_size for group in self._partitions()]

    @property
    def groups_padding(self) -> list[int]:
        """Elements of this rank's partitions that belong to no parameter, by group."""
        return [group.padding for group in self._partitions()]

    @property
    def param_slice_mappings(self) -> list[dict[str, FragmentAddress]]:
        """By group: where each parameter lies in the master of this rank."""
        return [
            {name: fragment.in_partition for name, fragment in group.fragments.items()}
            for group in self._partitions()
        ]

    def get_full_hp_param(self, name: str, key: str | None = None) -> Tensor:
        """The whole fp32 weight of a parameter, or a state of it; all ranks must call it."""
        return WholeTensors(self._partitions()).read(self.optimizer, name, key)

    def set_full_hp_param(self, name: str, value: Tensor, key: str | None = None) -> None:
        """Write this rank's part of a whole fp32 weight or state; model weights stay."""
        WholeTensors(self._partitions()).write(self.optimizer, name, value, key)

    def get_full_hp_grad(self, name: str) -> Tensor:
        """The reduced gradient of a parameter since the last step; all ranks must call it.

        As it is stored: multiplied by the loss scale and not clipped. Stage 1 has none before
        `reduce_gradients`.
        """
        reduced = [group.reduced for group in self._partitions()]
        return WholeTensors(self._partitions()).partitioned(name, reduced)

    def state_dict(self, *, cpu_offload: bool = False) -> StateDict:
        """The entry of this rank, by parameter; see `contract.checkpoint.elastic`.

        Args:
            cpu_offload: copy to the CPU one by one; the device needs no memory for it.
        """
        return elastic.saved(
            self._partitions(),
            self.optimizer,
            self._experts(),
            stage=2 if self.partition_gradients else 1,
            clip_grad=self.clip_grad,
            scale=self._saved_scale(),
            cpu_offload=cpu_offload,
        )

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict_list: Sequence[StateDict | None],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: Path | None = None,
    ) -> None:
        """Load states of either side's class, or of DeepSpeed's; all ranks must call it.

        Args:
            state_dict_list: one dict is a list of it, with `load_from_fp32_weights`. Otherwise
                entries of the data-parallel ranks that saved, as many as there are now
                or, with `elastic_checkpoint`, any number. Those that hold nothing of this rank's
                partitions may be None. Shards of DeepSpeed's ZeRO stand in the order of ranks; an
                elastic one has no options of the inner optimizer, which keeps its own.
            load_optimizer_states: False leaves the state of the inner optimizer.
            load_from_fp32_weights: take the saved masters, and write them to the model; otherwise
                masters come from the model weights, which the caller has loaded.
            checkpoint_folder: read a universal checkpoint from there instead, which always brings
                its masters, and no loss scale.

        Raises:
            ValueError: something does not fit; the sentence names it. Nothing has changed.
        """
        given, states = (self._partitions(), self.optimizer), load_optimizer_states
        scaling: object = None
        if checkpoint_folder is None:
            loaded, scaling = elastic.checked(
                *given,
                self._experts(),
                state_dict_list,
                self.ranks,
                restored=self._restored_scale(),
                states=states,
                rigid=not self.elastic_checkpoint,
                dealt=self.round_robin_gradients,
            )
        else:
            loaded = universal.read_partitions(*given, checkpoint_folder, self.ranks, states=states)
        # Everything fits from here on.
        self._enter_loaded(loaded, scaling)
        self.clip_grad = self.clip_grad if loaded.clip_grad is None else loaded.clip_grad
        if load_from_fp32_weights or checkpoint_folder is not None:
            for master, new in zip(
                self.single_partition_of_fp32_groups, loaded.masters, strict=True
            ):
                master.detach().copy_(new)
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
            for group in self._partitions()
        ]

    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable(self.round_robin_bit16_groups))
