"""The optimizer classes of both sides, behind one small interface that a training loop needs.

| dtype | around "adam" | around "lamb" |
| --- | --- | --- |
| fp16 | FP16Optimizer(FusedAdam) | FP16UnfusedOptimizer(FusedLamb) |
| bf16 | BF16Optimizer(FusedAdam) | FP16UnfusedOptimizer(FusedLamb), without loss scaling |
| fp32 | FusedAdam, torch clips | FusedLamb, torch clips |

The fp32 rows are the baseline: nothing of ours stands between the loop and the optimizer.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from twinstep.scenarios.plan import DTYPES, Plan, Settings

Saved = Mapping[str, object]
Build = Callable[..., torch.optim.Optimizer]


class Scaled(Protocol):
    """What the optimizers of fp16 and bf16 models have, on both sides; bf16 has no `loss_scale`."""

    overflow: bool
    loss_scale: float

    def backward(self, loss: Tensor) -> None:
        """Run backward from the loss, scaled if need be."""

    def get_global_norm(self) -> float:
        """Norm of the last step's unscaled gradients."""


class Stepper(ABC):
    """One optimizer as the training loop uses it.

    Attributes:
        optimizer: a `torch.optim.Optimizer`, for learning-rate schedules and checkpoints.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def _scaled(self) -> Scaled:
        return cast(Scaled, self.optimizer)

    @property
    def scale(self) -> float:
        """The loss scale in force."""
        return 1.0

    @property
    def norm(self) -> float:
        """Global norm of the unscaled gradients of the last step, before clipping."""
        return self._scaled.get_global_norm()

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self._scaled.overflow

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the micro-batches before it."""
        self._scaled.backward(loss)

    def step(self) -> None:
        """Update the weights, or skip the step."""
        self.optimizer.step()

    def state_dict(self) -> Saved:
        """What the optimizer saves."""
        return self.optimizer.state_dict()

    @abstractmethod
    def load_state_dict(self, saved: Saved) -> None:
        """Go on from a state of either side."""

    def observed(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the optimizer keeps, by name: masters, moments, counters."""
        state = self.optimizer.state
        masters = [m for group in self.optimizer.param_groups for m in group["params"]]
        for index, master in enumerate(masters):
            yield f"master {index}", master
            for name in sorted(state.get(master, {})):
                yield f"{name} {index}", state[master][name]


class ScaledStepper(Stepper):
    """`FP16Optimizer` or `FP16UnfusedOptimizer`."""

    @property
    def scale(self) -> float:
        """The scaler's."""
        return self._scaled.loss_scale

    def load_state_dict(self, saved: Saved) -> None:
        """Masters, moments, counters and the scaler's state."""
        self.optimizer.load_state_dict(dict(saved))


class Bf16Stepper(Stepper):
    """`BF16Optimizer`, whose states are those of all ranks: here, of one."""

    def load_state_dict(self, saved: Saved) -> None:
        """Masters and moments; the saved masters, not the rounded weights."""
        load: Callable[..., None] = self.optimizer.load_state_dict
        load([saved], load_from_fp32_weights=True)


class PlainStepper(Stepper):
    """An optimizer on the weights themselves, their gradients clipped by torch."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], max_norm: float
    ) -> None:
        super().__init__(optimizer)
        self._weights, self._max_norm = weights, max_norm
        self._norm = 0.0

    @property
    def norm(self) -> float:
        """As torch has it."""
        return self._norm

    @property
    def skipped(self) -> bool:
        """Never."""
        return False

    def backward(self, loss: Tensor) -> None:
        """Torch's own."""
        torch.autograd.backward(loss)

    def step(self) -> None:
        """Clip, then update."""
        self._norm = float(torch.nn.utils.clip_grad_norm_(self._weights, self._max_norm))
        self.optimizer.step()

    def load_state_dict(self, saved: Saved) -> None:
        """Moments and counters; weights are the caller's."""
        self.optimizer.load_state_dict(dict(saved))


def stepper_of(side: str, plan: Plan, names: Sequence[str], weights: Sequence[Tensor]) -> Stepper:
    """The optimizer of one side that a plan asks for, around the model's weights.

    Args:
        side: "reference" or "fast".
        plan: of a run with an optimizer class.
        names: of the weights.
        weights: leaves that require gradients, in the plan's dtype; written by steps.
    """
    settings = plan.settings()
    inside = _inside(side, plan.optimizer, weights, settings)
    if plan.dtype == "fp32" or plan.broken == "no-masters":
        return PlainStepper(inside, weights, settings.max_norm)
    if plan.optimizer == "adam" and plan.dtype == "bf16":
        build = _class(side, "bf16_optimizer", "BF16Optimizer")
        named = dict(zip(weights, names, strict=True))
        return Bf16Stepper(build(inside, param_names=named, clip_grad=settings.max_norm))
    if plan.optimizer == "adam":
        build = _class(side, "fp16_optimizer", "FP16Optimizer")
    else:
        build = _class(side, "fp16_unfused_optimizer", "FP16UnfusedOptimizer")
    return ScaledStepper(
        build(
            inside,
            low_precision_dtype=DTYPES[plan.dtype],
            clip_grad=settings.max_norm,
            verbose=False,
            **_scaling(side, settings),
        )
    )


def _class(side: str, module: str, name: str) -> Build:
    """A class of one side."""
    if side == "fast":
        side, module = "twinstep.fast.optimizers", module.removesuffix("_optimizer")
    return cast(Build, getattr(importlib.import_module(f"{side}.{module}"), name))


def _inside(
    side: str, optimizer: str, weights: Sequence[Tensor], settings: Settings
) -> torch.optim.Optimizer:
    """FusedAdam or FusedLamb, fresh."""
    name = {"adam": "FusedAdam", "lamb": "FusedLamb"}[optimizer]
    return _class(side, f"fused_{optimizer}", name)(
        list(weights),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def _scaling(side: str, settings: Settings) -> dict[str, object]:
    """The arguments for the loss-scale rule: the wrapper's own rule, or a scaler."""
    constants = {
        "init_scale": settings.init_scale,
        "scale_window": settings.scale_window,
        "min_scale": settings.min_scale,
    }
    if settings.rule == "static":
        return {"static_loss_scale": settings.init_scale}
    if settings.rule == "wrapper":
        return {"dynamic_loss_scale": True, "dynamic_loss_args": constants}
    scaler = _class(side, "scalers", "DynamicLossScale")
    hysteresis = {"delayed_shift": settings.delayed_shift} if settings.rule == "dynamic" else {}
    return {"loss_scale_config": scaler(rule=settings.rule, **constants, **hysteresis)}
