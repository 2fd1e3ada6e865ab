"""Masters and state of ZeRO on this side: made, copied to and from the model, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from twinstep.contract.checkpoint.entries import Loaded
from twinstep.contract.compat import CORRECT
from twinstep.contract.loss_scale import Saved
from twinstep.contract.sharded import Sharded
from twinstep.contract.wrapper import initialize
from twinstep.reference.loss_scale import ScaleState
from twinstep.reference.optimizers.partitioned_groups import (
    copy_masters_to_model,
    copy_model_to_masters,
    gather,
)
from twinstep.reference.optimizers.scaled_wrapper import ScaledWrapper
from twinstep.reference.optimizers.scalers import saved_scale
from twinstep.reference.optimizers.zero_groups import ZeroGroup


class ZeroMasters(Sharded, ScaledWrapper):
    """A wrapper whose masters are split over ranks; see `ZeroOptimizer` for the arguments.

    Attributes:
        groups: as laid out on this rank.
    """

    groups: list[ZeroGroup]
    _unscaled = "the model"

    def _partitions(self) -> list[ZeroGroup]:
        return self.groups

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

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients, sums of them, and inner state."""
        return self._bytes(
            model_weights=self.bit16_groups_flat,
            master_weights=self.single_partition_of_fp32_groups,
            gradients=[param.grad for param in self._params()],
            accumulators=[t for group in self.groups for t in (group.accumulator, group.reduced)],
        )

    def _saved_scale(self) -> Saved:
        return saved_scale(self.loss_scaler) if self.scales else {}

    def _restored_scale(self) -> Callable[[Mapping[str, object]], ScaleState] | None:
        return self.loss_scaler.restored if self.scales else None

    def _enter_loaded(self, loaded: Loaded, scaling: object) -> None:
        if loaded.inner is not None:
            self.optimizer.load_state_dict(loaded.inner)
        self.loss_scaler.state = cast(ScaleState, scaling) or self.loss_scaler.state
