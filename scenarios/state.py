"""What an optimizer step reads and writes, and the numbers that steer it.

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

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RULES = ("static", "dynamic", "wrapper", "torch")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyper-parameters of one run; the loss-scale numbers are small so that a short run meets them.

    Attributes:
        lr: learning rate after warm-up.
        warm_up: steps over which the learning rate rises linearly to `lr`.
        max_norm: gradients longer than this are shortened to it.
        rule: the loss-scale rule: "static", "dynamic" (hysteresis), "wrapper" or "torch".
        init_scale: first loss scale; the default overflows fp16 on the first steps.
        scale_window: clean steps before the scale grows.
        delayed_shift: hysteresis of the "dynamic" rule, in overflows.
    """

    lr: float = 3e-3
    warm_up: int = 10
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    rule: str = "dynamic"
    init_scale: float = 2.0**20
    scale_factor: float = 2.0
    scale_window: int = 4
    min_scale: float = 1.0
    delayed_shift: int = 2

    def __post_init__(self) -> None:
        if self.warm_up < 1:
            raise ValueError(f"warm_up={self.warm_up}, but should be at least 1 [Settings]")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run; equal plans on one machine give equal bits.

    Attributes:
        dtype: of the model: "fp16" with loss scaling, "bf16" or "fp32" without.
        steps: optimizer steps, skipped ones included.
        seed: of the weights and of every batch.
        ranks: how many ranks' batches make up a step; they run one after the other, in rank order.
        rule: the loss-scale rule in fp16.
        scale_window: clean steps before the scale grows.
    """

    dtype: str = "fp16"
    steps: int = 16
    seed: int = 0
    ranks: int = 1
    rule: str = "dynamic"
    scale_window: int = 4

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}, but should be one of {[*DTYPES]} [Plan]")
        for name in ("steps", "ranks", "scale_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but should be at least 1 [Plan]")
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r}, but should be one of {RULES} [Plan]")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}, but should be at least 0 [Plan]")

    def settings(self) -> Settings:
        """Hyper-parameters: fp16 scales its loss by the rule, bf16 and fp32 do not scale."""
        if self.dtype == "fp16":
            return Settings(rule=self.rule, scale_window=self.scale_window)
        return Settings(rule="static", init_scale=1.0, scale_window=self.scale_window)


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
