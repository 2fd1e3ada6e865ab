"""Optimizer classes that are written otherwise than the reference and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from twinstep.parity.proof.corpus.optimizers import Optimizer, put
from twinstep.parity.proof.corpus.ordinary_classes import ORDINARY
from twinstep.reference.optimizers.fused_adam import FusedAdam, ParamGroup

# Bias corrections are 1 after that many steps: torch's own functions know no other way to be rid of
# them.
FOREVER = 1e9
HARMLESS_OPTIMIZERS = [Optimizer(cls=FusedAdam, says="The reference itself.", dtypes=("mixed",))]


@put(HARMLESS_OPTIMIZERS, dtypes=("bf16",))
class BackToFront(FusedAdam):
    """Steps the parameters of a group backwards, unless the first one's count is that of all."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        super()._step_group(group, params[:: 1 if self.compat.shared_step_counter else -1])


@put(HARMLESS_OPTIMIZERS, flat=True)
class FlatMoments(FusedAdam):
    """Keeps both moments of a parameter in one buffer."""

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        state = super()._initial_state(param)
        buffer = torch.zeros(2 * param.numel(), dtype=torch.float32, device=param.device)
        halves = buffer.split(param.numel()) if param.numel() else (buffer, buffer.clone())
        names = ("exp_avg", "exp_avg_sq")
        return {
            **state,
            **{n: half.view(param.shape) for n, half in zip(names, halves, strict=True)},
        }


@put(HARMLESS_OPTIMIZERS, private=("_scratch",))
class KeepsACache(FusedAdam):
    """Remembers something private."""

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        self._scratch = torch.zeros(sum(param.numel() for param in params))
        super()._step_group(group, params)


@put(HARMLESS_OPTIMIZERS, arithmetic="bounded")
class TorchForeach(FusedAdam):
    """Hands the arithmetic of a group to torch's foreach implementation."""

    way = {"foreach": True}

    def _step_group(self, group: ParamGroup, params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = self._initial_state(param)
        if not params:
            return
        rows = [self.state[param] for param in params]
        corrected = bool(group["bias_correction"])
        steps = [row["step"].float() if corrected else torch.tensor(FOREVER) for row in rows]
        beta1, beta2 = cast(tuple[float, float], group["betas"])
        update = cast(Callable[..., None], adamw if self.adam_w_mode else adam)
        update(
            params,
            [cast(Tensor, param.grad) for param in params],
            [row["exp_avg"] for row in rows],
            [row["exp_avg_sq"] for row in rows],
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            **self.way,
        )
        for row in rows:
            row["step"] += 1


@put(HARMLESS_OPTIMIZERS, arithmetic="bounded")
class TorchOneByOne(TorchForeach):
    """Hands the arithmetic of a group to torch's plain implementation."""

    way = {"foreach": False}


HARMLESS_OPTIMIZERS += ORDINARY
