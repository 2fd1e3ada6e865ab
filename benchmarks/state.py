"""The tensors of an AdamW step for measurements: bf16 gradients and copies, fp32 state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UPDATE_BYTES = 28  # per parameter: reads 2 + 4 + 4 + 4, writes 4 + 4 + 4 + 2

HYPER = {"lr": 1e-3, "beta1": 0.91, "beta2": 0.987, "eps": 1e-7, "weight_decay": 0.03}


@dataclass(frozen=True)
class State:
    """Argument lists of one step.

    Attributes:
        lists: params, grads, exp_avgs, exp_avg_sqs, copies, steps; a flat buffer is a list of one.
    """

    lists: tuple[list[Tensor], ...]

    @property
    def grads(self) -> list[Tensor]:
        """The gradients, bf16."""
        return self.lists[1]

    def clone(self) -> State:
        """The same values in other memory."""
        return State(tuple([tensor.clone() for tensor in role] for role in self.lists))

    def equals(self, other: State) -> bool:
        """True if all bits are equal."""
        return all(
            torch.equal(bits(mine), bits(theirs))
            for one, two in zip(self.lists, other.lists, strict=True)
            for mine, theirs in zip(one, two, strict=True)
        )


def apply(
    kernel: Callable[..., object], state: State, controls: dict[str, Tensor], **options: object
) -> None:
    """Call a step operation with the state's lists."""
    kernel(*state.lists, **controls, **options)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's content as integers of its own width."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def new_state(sizes: Sequence[int], device: torch.device, seed: int = 0) -> State:
    """State of these sizes with plausible values; the same for the same seed and device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(size: int, dtype: torch.dtype, spread: float) -> Tensor:
        drawn = torch.empty(size, dtype=dtype, device=device)
        return drawn.normal_(0.0, spread, generator=generator)

    params = [normal(size, torch.float32, 0.1) for size in sizes]
    grads = [normal(size, torch.bfloat16, 0.01) for size in sizes]
    exp_avgs = [normal(size, torch.float32, 0.01) for size in sizes]
    exp_avg_sqs = [normal(size, torch.float32, 0.01).abs_() for size in sizes]
    copies = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]
    steps = [torch.zeros((), dtype=torch.int64, device=device) for _ in sizes]
    return State((params, grads, exp_avgs, exp_avg_sqs, copies, steps))


def controls(device: torch.device) -> dict[str, Tensor]:
    """Control tensors of `adamw_step`: an ordinary step with everything finite."""
    wide = {name: torch.tensor(value, dtype=torch.float64) for name, value in HYPER.items()}
    narrow = {"factor": torch.tensor(0.5), "found_inf": torch.tensor(0.0)}
    return {name: value.to(device) for name, value in {**wide, **narrow}.items()}


def mixed_controls(device: torch.device) -> dict[str, Tensor]:
    """Control tensors of `mixed_step`: dynamic scaling that grows on every second clean step."""
    floats = {
        **HYPER,
        "max_norm": 0.7,
        "scale": 2.0**10,
        "scale_factor": 2.0,
        "min_scale": 1.0,
        "backoff_factor": 0.5,
    }
    counts = {
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "cur_hysteresis": 1,
        "growth_tracker": 0,
        "exhausted": 0,
        "scale_window": 2,
        "delayed_shift": 1,
    }
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in floats.items()}
    found |= {name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()}
    found |= {name: torch.tensor(0.0) for name in ("norm", "found_inf")}
    return {name: value.to(device) for name, value in found.items()}


MIXED_OPTIONS: dict[str, object] = {
    "adam_w_mode": True,
    "bias_correction": True,
    "rule": "dynamic",
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": False,
}
