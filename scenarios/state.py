"""What an optimizer step reads and writes.

One `State` is the whole memory of a mixed-precision step: master weights, moments, model weights
(copies), step counters and the loss-scale automaton. Tensors travel as lists; a flat buffer is a
list of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from twinstep.scenarios.plan import DTYPES, Settings


def float_control(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A control value as the 0-dim tensor that operations take."""
    return torch.tensor(value, dtype=dtype)


def int_control(value: int) -> Tensor:
    """A counter as the 0-dim int64 tensor that operations take."""
    return torch.tensor(value, dtype=torch.int64)


@dataclass(kw_only=True)
class State:
    """Everything that outlives a step, in the order in which `mixed_step` writes it.

    Attributes:
        params: master weights, fp32.
        exp_avgs: first moments, fp32.
        exp_avg_sqs: second moments, fp32.
        copies: model weights in 16 bits; empty when the model runs on the masters themselves.
        steps: one 0-dim int64 per tensor.
        norm: fp32, global norm of the last step's unscaled gradients.
        found_inf: fp32, 1.0 if the last step was skipped.
    """

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    copies: list[Tensor]
    steps: list[Tensor]
    scale: Tensor
    cur_iter: Tensor = field(default_factory=lambda: int_control(0))
    last_overflow_iter: Tensor = field(default_factory=lambda: int_control(-1))
    cur_hysteresis: Tensor = field(default_factory=lambda: int_control(1))
    growth_tracker: Tensor = field(default_factory=lambda: int_control(0))
    exhausted: Tensor = field(default_factory=lambda: int_control(0))
    norm: Tensor = field(default_factory=lambda: float_control(0.0, torch.float32))
    found_inf: Tensor = field(default_factory=lambda: float_control(0.0, torch.float32))

    def items(self) -> Iterator[tuple[str, list[Tensor] | Tensor]]:
        """Name and value of every entry, in the order in which `mixed_step` writes them."""
        for entry in fields(self):
            yield entry.name, getattr(self, entry.name)

    def clone(self) -> State:
        """A copy that shares no storage with this one."""
        copy: dict[str, Any] = {name: cloned(value) for name, value in self.items()}
        return State(**copy)


def cloned(value: list[Tensor] | Tensor) -> list[Tensor] | Tensor:
    """Copies of a list of tensors, or of one tensor, that share no storage with it."""
    return [tensor.clone() for tensor in value] if isinstance(value, list) else value.clone()


def initial_state(weights: Sequence[Tensor], dtype: str, settings: Settings) -> State:
    """The state before the first step: masters and their copies, moments and counters at zero."""
    masters = [weight.clone() for weight in weights]
    low = dtype != "fp32"
    return State(
        params=masters,
        exp_avgs=[torch.zeros_like(master) for master in masters],
        exp_avg_sqs=[torch.zeros_like(master) for master in masters],
        copies=[master.to(DTYPES[dtype]) for master in masters] if low else [],
        steps=[int_control(0) for _ in masters],
        scale=float_control(settings.init_scale),
        cur_hysteresis=int_control(settings.delayed_shift),
    )


def model_weights(state: State) -> list[Tensor]:
    """The tensors that the model computes with: the copies, or the masters where there are none."""
    return state.copies or state.params
