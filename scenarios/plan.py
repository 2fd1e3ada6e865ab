"""Plans of scenarios: dtype, length, optimizer, loss-scale rule, hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from twinstep.scenarios.model import Shape

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RULES = ("static", "dynamic", "wrapper", "torch")
UNSHARDED = ("adam", "lamb")
ZERO = ("zero1", "zero2")
OPTIMIZERS = ("mixed_step", *UNSHARDED, *ZERO)
# What a run can do wrong on purpose, and the dtype in which it is wrong.
BROKEN = {"none": "", "no-masters": "bf16", "scale-stuck": "fp16"}

TOO_HIGH = 2.0**20  # overflows fp16 on the first steps, so that a rule has something to do
STATIC_SCALE = 2.0**12  # never overflows here: a static scale cannot come down
STUCK = 2.0**24  # overflows fp16 on every step
LEARNING_RATE = {"mixed_step": 3e-3, "adam": 2e-3, "lamb": 1e-2, "zero1": 2e-3, "zero2": 2e-3}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run and its hyper-parameters; equal plans on one machine give equal bits.

    Attributes:
        optimizer: what takes the step: the operation "mixed_step", the optimizer classes around
            "adam" or "lamb", or ZeroOptimizer in stage "zero1" or "zero2" around "adam".
        dtype: of the model: "fp16" with loss scaling, "bf16" or "fp32" without.
        steps: optimizer steps, skipped ones included.
        seed: of the weights and of every batch.
        accumulate: micro-batches that make up a step.
        rule: the loss-scale rule in fp16: "static", "dynamic" (hysteresis), "wrapper" or "torch".
        scale_window: clean steps before the scale grows; small, so that a short run meets growth.
        held_out: batches of unseen text that a held-out loss is the mean of.
        broken: what the run does wrong on purpose: "none", "no-masters" (bf16 weights are updated
            in place, without fp32 masters) or "scale-stuck" (a static fp16 loss scale so high that
            every step overflows).
        exact_sums: round the gradients of each micro-batch, so that every sum of them is exact
            (`ranks.exact_addend`): ZeRO has the same bits on any number of ranks then.
        offload: ZeRO keeps masters and their state on the CPU.
        shape: sizes of the model.
        warm_up: steps over which the learning rate rises linearly.
        last: the learning rate of the last step, as a share of `lr`.
        max_norm: gradients longer than this are shortened to it.
        delayed_shift: hysteresis of the "dynamic" rule, in overflows.
        first_scale: of the "dynamic", "wrapper" and "torch" rules.
        cycle: steps after which the learning rate's curve begins again; 0 is one curve.
        wide_norms: weights of norms stay in fp32, whatever the dtype of the others.
        as_deepspeed: around "adam" in 16 bits, what DeepSpeed's engine makes of an optimizer
            without ZeRO: FP16UnfusedOptimizer, with `Compat.deepspeed()`.
    """

    optimizer: str = "mixed_step"
    dtype: str = "fp16"
    steps: int = 16
    seed: int = 0
    accumulate: int = 1
    rule: str = "dynamic"
    scale_window: int = 4
    held_out: int = 8
    broken: str = "none"
    exact_sums: bool = False
    offload: bool = False
    shape: Shape = field(default_factory=Shape)
    warm_up: int = 10
    last: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    scale_factor: float = 2.0
    min_scale: float = 1.0
    delayed_shift: int = 2
    first_scale: float = TOO_HIGH
    cycle: int = 0
    wide_norms: bool = False
    as_deepspeed: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("dtype", tuple(DTYPES)),
            ("rule", RULES),
            ("broken", tuple(BROKEN)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}, but should be one of {[*known]} [Plan]"
                )
        for name in ("steps", "accumulate", "scale_window", "held_out", "warm_up"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but should be at least 1 [Plan]")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}, but should be at least 0 [Plan]")
        self._require_fitting()

    def _require_fitting(self) -> None:
        """Refuse what one of the two kinds of steps does not know."""
        operation = self.optimizer == "mixed_step"
        if self.broken != "none" and (operation or self.dtype != BROKEN[self.broken]):
            raise ValueError(
                f"broken={self.broken!r}, but that goes with an optimizer class and "
                f"dtype={BROKEN[self.broken]!r} [Plan]"
            )
        zero = self.optimizer in ZERO
        for name in ("exact_sums", "offload"):
            if getattr(self, name) and not zero:
                raise ValueError(
                    f"{name}=True, but that goes with optimizer='zero1' or 'zero2' [Plan]"
                )
        if zero and self.broken == "no-masters":
            raise ValueError(
                "broken='no-masters', but that goes with optimizer='adam' or 'lamb' [Plan]"
            )
        if zero and self.dtype == "fp16" and self.rule == "torch":
            raise ValueError(
                "rule='torch', but should be 'wrapper', 'dynamic' or 'static' with ZeRO [Plan]"
            )

    @property
    def lr(self) -> float:
        """The highest learning rate."""
        return LEARNING_RATE[self.optimizer]

    def share(self, step: int) -> float:
        """The learning rate of a step, counted from 1, as a share of `lr`.

        min(1, t / warm_up) * (last + (1 - last) * (1 + cos(pi * t / steps)) / 2), in float64; with
        a cycle, t is counted within it, and steps are those of the cycle.
        """
        length = self.cycle or self.steps
        step = (step - 1) % length + 1 if self.cycle else min(step, length)
        fall = (1.0 + math.cos(math.pi * step / length)) / 2.0
        return min(1.0, step / self.warm_up) * (self.last + (1.0 - self.last) * fall)

    @property
    def scaling(self) -> tuple[str, float]:
        """The loss-scale rule in force and the first scale; bf16 and fp32 do not scale."""
        if self.dtype != "fp16":
            return "static", 1.0
        if self.broken == "scale-stuck":
            return "static", STUCK
        return self.rule, STATIC_SCALE if self.rule == "static" else self.first_scale
