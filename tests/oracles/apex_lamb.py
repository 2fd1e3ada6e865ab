"""apex's FusedLAMB as its documentation gives it, in float64: all groups, stage by stage.

First the norm of all gradients; then, for each tensor, stage 1 forms an update in a buffer, and
stage 2 reads norms and buffer. Written from the documented algorithm, apart from the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Tensors:
    """A parameter with its moments; a gradient of None is left out."""

    weight: Array
    m: Array = field(init=False)
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        self.m, self.v = np.zeros_like(self.weight), np.zeros_like(self.weight)


@dataclass
class Group:
    """Parameters with options in common, and one counter."""

    tensors: list[Tensors]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    grad_averaging: bool = True
    step: int = 0


@dataclass
class ApexLambOracle:
    """The whole optimizer.

    Attributes:
        groups: stepped together, for one norm is of all their gradients.
        max_grad_norm: of all gradients together; one number, as apex takes it from its defaults.
        adam_w_mode: decay in the update, not in the gradient.
        use_nvlamb: trust ratios without decay too.
    """

    groups: list[Group]
    max_grad_norm: float = 1.0
    adam_w_mode: bool = True
    use_nvlamb: bool = False

    def step(self, grads: Sequence[Sequence[Array | None]]) -> None:
        """Take one step with gradients by group."""
        squares = [np.sum(g * g) for row in grads for g in row if g is not None]
        total = float(np.sqrt(np.sum(squares)))
        clip = total / self.max_grad_norm if total > self.max_grad_norm else 1.0
        for group, row in zip(self.groups, grads, strict=True):
            group.step += 1
            for tensors, grad in zip(group.tensors, row, strict=True):
                if grad is not None:
                    update = self._stage1(group, tensors, grad / clip)
                    self._stage2(group, tensors, update)

    def _stage1(self, group: Group, tensors: Tensors, grad: Array) -> Array:
        beta1, beta2 = group.betas
        beta3 = 1 - beta1 if group.grad_averaging else 1.0
        if not self.adam_w_mode:
            grad = grad + group.weight_decay * tensors.weight
        tensors.m = tensors.m * beta1 + beta3 * grad
        tensors.v = tensors.v * beta2 + (1 - beta2) * grad * grad
        first = 1 - beta1**group.step if group.bias_correction else 1.0
        second = 1 - beta2**group.step if group.bias_correction else 1.0
        update = (tensors.m / first) / (np.sqrt(tensors.v / second) + group.eps)
        return update + group.weight_decay * tensors.weight if self.adam_w_mode else update

    def _stage2(self, group: Group, tensors: Tensors, update: Array) -> None:
        ratio = group.lr
        if self.use_nvlamb or group.weight_decay != 0.0:
            weights, updates = np.linalg.norm(tensors.weight), np.linalg.norm(update)
            if weights != 0.0 and updates != 0.0:
                ratio = group.lr * float(weights / updates)
        tensors.weight = tensors.weight - ratio * update
