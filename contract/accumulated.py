"""Masters that are split over ranks beside accumulated gradients, from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor

from twinstep.contract.fragments import FragmentAddress, Partition
from twinstep.contract.whole import WholeTensors
from twinstep.contract.wrapper import Wrapper


class AccumulatingPartition(Partition, Protocol):
    """One rank's part of a parameter group, as `BF16Optimizer` splits it."""

    accumulator: Tensor
    has_gradient: list[bool]

    @property
    def params(self) -> list[Tensor]:
        """The trained parameters, in order."""


class Accumulated(Wrapper, ABC):
    """Words of `BF16Optimizer` that read; each side computes with its own arithmetic.

    Attributes:
        immediate_grad_update: hooks accumulate each gradient as soon as backward has it.
    """

    immediate_grad_update: bool
    loads_lists = True
    _model = "bf16_groups"

    @abstractmethod
    def _partitions(self) -> Sequence[AccumulatingPartition]:
        """The groups, as laid out on this rank."""

    @property
    def bf16_groups(self) -> list[list[Tensor]]:
        """The trained parameters, by group."""
        return [group.params for group in self._partitions()]

    @property
    def bf16_groups_flat(self) -> list[Tensor]:
        """The flat model weights, padding included."""
        return [group.flat for group in self._partitions()]

    @property
    def fp32_groups_flat_partition(self) -> list[Tensor]:
        """The masters of this rank."""
        return [group.master for group in self._partitions()]

    @property
    def param_slice_mappings(self) -> list[dict[str, FragmentAddress]]:
        """By group: where each parameter lies in the master of this rank."""
        return [
            {name: fragment.in_partition for name, fragment in group.fragments.items()}
            for group in self._partitions()
        ]

    @property
    def group_paddings(self) -> list[int]:
        """Elements of this rank's partition that belong to no parameter, by group."""
        return [group.padding for group in self._partitions()]

    @property
    def partition_count(self) -> list[int]:
        """Ranks that split each group."""
        return [group.world for group in self._partitions()]

    @property
    def _global_grad_norm(self) -> float:
        return cast(float, self.get_global_norm())  # type: ignore[attr-defined]

    def memory_report(self) -> dict[str, int]:
        """Bytes of model weights, masters, gradients, accumulators and inner state."""
        return self._bytes(
            model_weights=self.bf16_groups_flat,
            master_weights=self.fp32_groups_flat_partition,
            gradients=[param.grad for param in self._params()],
            accumulators=[group.accumulator for group in self._partitions()],
        )

    def get_full_hp_param(self, name: str, key: str | None = None) -> Tensor:
        """The whole fp32 weight of a parameter, or a state of it; all ranks must call it."""
        return WholeTensors(self._partitions()).read(self.optimizer, name, key)

    def set_full_hp_param(self, name: str, value: Tensor, key: str | None = None) -> None:
        """Write this rank's part of a whole fp32 weight or state; model weights stay."""
        WholeTensors(self._partitions()).write(self.optimizer, name, value, key)

    def get_full_hp_grad(self, name: str) -> Tensor:
        """The accumulated gradient of a parameter, neither averaged nor clipped."""
        return WholeTensors(self._partitions()).gradient(name)

    def _half(self) -> torch.dtype | None:
        return torch.bfloat16

    def _params(self) -> list[Tensor]:
        return list(chain.from_iterable(self.bf16_groups))

    def _trained(self) -> Iterator[Tensor]:
        return chain.from_iterable(group.params for group in self._partitions())

    def _refuse(self, closure: object) -> None:
        super()._refuse(closure)
        some = any(True in group.has_gradient for group in self._partitions())
        if not (some or self.immediate_grad_update) and self._mark.differs(self._trained()):
            raise RuntimeError(
                "parameters have gradients, but none was accumulated: call optimizer.backward(loss)"
                " instead of loss.backward(), or update_hp_grads() after it "
                f"[{type(self).__name__}.step]"
            )
        if not some:
            self._name_idle_step(())

    def _kept(self) -> dict[str, object]:
        return {
            "sums": [(group.accumulator, list(group.has_gradient)) for group in self._partitions()]
        }

    def _enter_copied(self, state: object, kept: Mapping[str, object]) -> None:
        """Take over state dict and accumulators of the optimizer that this one is a copy of."""
        super()._enter_copied(state, {})
        sums = cast("list[tuple[Tensor, list[bool]]]", kept["sums"])
        for group, (accumulator, has_gradient) in zip(self._partitions(), sums, strict=True):
            group.accumulator.copy_(accumulator)
            group.has_gradient = has_gradient
