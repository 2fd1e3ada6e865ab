"""What to run: the plan of a scenario and the hyper-parameters that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scenarios.model import Shape

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RULES = ("static", "dynamic", "wrapper", "torch")

TOO_HIGH = 2.0**20  # overflows fp16 on the first steps, so that a rule has something to do
STATIC_SCALE = 2.0**12  # never overflows here: a static scale cannot come down


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyper-parameters of one run; the scale window is small so that a short run meets growth.

    Attributes:
        lr: learning rate after warm-up.
        warm_up: steps over which the learning rate rises linearly to `lr`.
        max_norm: gradients longer than this are shortened to it.
        rule: the loss-scale rule: "static", "dynamic" (hysteresis), "wrapper" or "torch".
        init_scale: first loss scale.
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
    init_scale: float
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
        shape: sizes of the model.
    """

    dtype: str = "fp16"
    steps: int = 16
    seed: int = 0
    ranks: int = 1
    rule: str = "dynamic"
    scale_window: int = 4
    shape: Shape = field(default_factory=Shape)

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
            first = STATIC_SCALE if self.rule == "static" else TOO_HIGH
            return Settings(rule=self.rule, init_scale=first, scale_window=self.scale_window)
        return Settings(rule="static", init_scale=1.0, scale_window=self.scale_window)
