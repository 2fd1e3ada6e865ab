"""Options of `ZeroOptimizer`: what may be combined, and what ranks should have alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, cast

import torch
import torch.distributed as dist

from twinstep.contract.parallel import ExpertGroups
from twinstep.contract.refusals import check_bucket
from twinstep.contract.tensors import FLOATS, dtype_names

SCALER_ARGUMENTS = (
    *("init_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"),
    *("scale_factor", "raise_error_at_min_scale"),
)
WHERE = "ZeroOptimizer"


class OffloadConfig(Protocol):
    """Config of an offload, as DeepSpeed has it.

    Attributes:
        device: "none" or "cpu", or an enum with that value.
        pin_memory: copy to and from a GPU through pinned memory; False if there is none.
    """

    device: object


def offloads(config: OffloadConfig | None) -> bool:
    """True if masters, state and gradients are to be in the memory of the CPU.

    Raises:
        ValueError: the device is another one.
    """
    device = getattr(config, "device", None)
    name = "none" if device is None else str(getattr(device, "value", device))
    if name not in ("none", "cpu"):
        raise ValueError(
            f"offload_optimizer_config.device is {name}, but should be none or cpu [{WHERE}]"
        )
    return name == "cpu"


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Options that decide how gradients of all ranks become one, and in which messages.

    Attributes:
        partition_grads: True for stage 2, False for stage 1.
        reduce_scatter: gradients are reduced towards the rank that owns them, and divided before.
        postscale_gradients: without `reduce_scatter`: divide after the sum over ranks.
        gradient_predivide_factor: part of that divisor that is taken before.
        gradient_average: the mean over ranks; False for the sum.
        gradient_accumulation_dtype: of the sums over micro-batches.
        communication_data_type: of gradients that are sent; None for the dtype of the model.
        contiguous_gradients: buckets are copied into one buffer.
        reduce_bucket_size: largest number of elements that one message reduces.
        allgather_bucket_size: largest number of elements that one message gathers; even.
        has_moe_layers: there are groups of experts.

    Raises:
        ValueError: options that cannot be combined, or make no sense.
    """

    partition_grads: bool = True
    reduce_scatter: bool = True
    postscale_gradients: bool = True
    gradient_predivide_factor: float = 1.0
    gradient_average: bool = True
    gradient_accumulation_dtype: torch.dtype = torch.float32
    communication_data_type: torch.dtype | None = None
    contiguous_gradients: bool = True
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 5_000_000_000
    has_moe_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("gradient_accumulation_dtype", "communication_data_type"):
            dtype = cast("torch.dtype | None", getattr(self, name))
            if dtype not in FLOATS and not (dtype is None and name.startswith("comm")):
                raise ValueError(f"{name}={dtype}, but should be {dtype_names(FLOATS)} [{WHERE}]")
        factor = self.gradient_predivide_factor
        if not 0.0 < factor < float("inf"):
            raise ValueError(
                f"gradient_predivide_factor={factor}, but should be positive and finite [{WHERE}]"
            )
        if not int(self.reduce_bucket_size) > 0:
            raise ValueError(
                f"reduce_bucket_size={self.reduce_bucket_size}, but should be positive [{WHERE}]"
            )
        if check_bucket(self.allgather_bucket_size, WHERE) % 2:
            raise ValueError(
                f"allgather_bucket_size={self.allgather_bucket_size}, but should be even: every "
                f"partition is [{WHERE}]"
            )
        self._check_divisors()
        self._check_experts()

    def _check_divisors(self) -> None:
        if not (self.reduce_scatter and self.gradient_average):
            return
        for name, plain in (("gradient_predivide_factor", 1.0), ("postscale_gradients", True)):
            if getattr(self, name) != plain:
                raise ValueError(
                    f"{name}={getattr(self, name)}, but should be {plain} with reduce_scatter=True,"
                    f" which divides before it sums [{WHERE}]"
                )

    def _check_experts(self) -> None:
        if self.has_moe_layers and not self.reduce_scatter:
            raise ValueError(
                "reduce_scatter=False, but should be True with has_moe_layers=True: experts have "
                f"ranks of their own [{WHERE}]"
            )
        if self.has_moe_layers and self.partition_grads and not self.contiguous_gradients:
            raise ValueError(
                "contiguous_gradients=False, but should be True with has_moe_layers=True in stage "
                f"2 [{WHERE}]"
            )

    def alike(self) -> dict[str, float]:
        """Numbers that all ranks should have alike, by option; dtypes by their bytes."""
        found: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.dtype | None):
                value = -1 if value is None else FLOATS.index(value)
            found[field.name] = float(value)
        return found


ALIKE = (
    "clip_grad",
    "loss_scale",
    "check_grad_overflow",
    "elastic_checkpoint",
    "round_robin_gradients",
)
"""Attributes besides the options that all ranks should have alike."""


def refuse_unbuilt(**given: object) -> None:
    """Refuse options that would change results and that neither side has.

    Args:
        given: by name; each should be False, None, or True for `ignore_unused_parameters`.

    Raises:
        ValueError: one is set.
    """
    reasons = {
        "fp16_master_weights_and_gradients": (False, "master weights are fp32"),
        "bf16_master_weights_and_gradients": (False, "master weights are fp32"),
        "bf16_optimizer_states": (False, "the inner optimizer decides on its state"),
        "zenflow_config": (None, "updates are not put off"),
        "ignore_unused_parameters": (True, "a missing gradient is one of zeros"),
    }
    for name, value in given.items():
        wanted, reason = reasons[name]
        if value != wanted:
            raise ValueError(f"{name}={value}, but should be {wanted}: {reason} [{WHERE}]")


def check_expert_groups(
    names: set[str],
    expert_parallel_group: ExpertGroups,
    expert_data_parallel_group: ExpertGroups,
    dp_process_group: dist.ProcessGroup | None,
) -> None:
    """Require process groups of all experts, within the data-parallel ranks.

    Args:
        names: of the experts that parameter groups hold.
        expert_parallel_group: by name; its ranks hold different experts.
        expert_data_parallel_group: by name; its ranks hold the same experts.
        dp_process_group: all ranks among which gradients and norms are added up.

    Raises:
        ValueError: a group is missing, or has ranks that the data-parallel group has not.
    """
    world = [] if dp_process_group is None else list(dist.get_process_group_ranks(dp_process_group))
    given = {
        "expert_parallel_group": expert_parallel_group,
        "expert_data_parallel_group": expert_data_parallel_group,
    }
    for name in sorted(names):
        for argument, groups in given.items():
            if name not in groups:
                raise ValueError(f"{argument} has no group for experts {name} [{WHERE}]")
            ranks = set(dist.get_process_group_ranks(groups[name])).difference(world)
            if ranks:
                raise ValueError(
                    f"{argument} {name} has ranks {sorted(ranks)}, but dp_process_group has "
                    f"{world or 'none'}: it should hold all of them [{WHERE}]"
                )


def check_scaler_arguments(given: Mapping[str, object]) -> None:
    """Require names of arguments that a dynamic loss scale has.

    Raises:
        ValueError: one has another name.
    """
    unknown = [name for name in given if name not in SCALER_ARGUMENTS]
    if unknown:
        raise ValueError(
            f"dynamic_loss_args has {', '.join(unknown)}, but should have some of "
            f"{', '.join(SCALER_ARGUMENTS)} [{WHERE}]"
        )


def check_names(names: Sequence[str]) -> None:
    """Require names that differ: checkpoints address parameters by them.

    Raises:
        ValueError: two parameters have one name.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"param_names gives {', '.join(twice[:3])} to several parameters, but names should "
            f"differ [{WHERE}]"
        )
